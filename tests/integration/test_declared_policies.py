"""A queue's policies are in Redis and apply to all its workers, no matter what they declare."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery, states
from kombu import Consumer, Queue
from kombu.common import Broadcast

from celery_ext import install
from celery_ext.http.service.service import Service as HttpService
from celery_ext.policies import Backoff, Fair, Limit
from celery_ext.policies.of_message import strategies_in
from celery_ext.policies.written import CODE, written
from kombu_delayed.consumer.policy.decisions import ALL_QUEUES
from kombu_delayed.store.policies.declared import parsed
from tests.kit.clusters import Cluster
from tests.kit.ledger import Ledger
from tests.kit.policed import OpenApp, run_next, take
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

pytestmark = pytest.mark.thorough

ONE, TWO = [written(Limit(concurrency=1))], [written(Limit(concurrency=2))]
BY_FUNCTION = [{"Fair": {"by": {CODE: "tests.kit.declaring_app:region"}}}]

#: Starts a worker; `declares` are its policies by queue, None: it knows of no policies at all.
Start = Callable[..., Worker]


@pytest.fixture(params=["server", "cluster"])
def broker(request: pytest.FixtureRequest, server: Server) -> Server | Cluster:
    return server if request.param == "server" else request.getfixturevalue("cluster")


@pytest.fixture
def start(broker: Server | Cluster, ledger: Ledger, tmp_path: Path) -> Any:
    with ExitStack() as stack:

        def start_worker(name: str, declares: dict[str, Any] | None = None, **more: Any) -> Worker:
            settings = Settings(
                f"delayed+{broker.url}",
                ledger=str(ledger.path),
                config={"declares": declares} if declares is not None else {},
            )
            module = "tasks_app" if declares is None else "declaring_app"
            given = {"pool": "threads", "concurrency": 4, "module": f"tests.kit.{module}", **more}
            return stack.enter_context(Worker(settings, tmp_path, name=name, **given))

        yield start_worker


@pytest.fixture
def app(broker: Server | Cluster) -> Any:
    with Celery(broker=f"delayed+{broker.url}", set_as_current=False) as app, ExitStack() as stack:
        stack.callback(install(app).close)
        yield app


def wait_until_declared(app: Celery, policies: list[dict[str, Any]]) -> None:
    """A worker declares with its first claim, which may be after it says it is ready."""
    records = app.delayed.store.policies

    def declared() -> Any:
        return parsed(records.read("celery").text).get("queue", [])

    wait_until(lambda: declared() == policies, f"{policies} are declared", 30)


def send(app: Celery, ids: str, queue: str = "celery") -> None:
    for id in ids:
        app.send_task("late", (0.2,), task_id=id, queue=queue)


def most_at_once(rows: list[dict[str, Any]]) -> int:
    most = now = 0
    for row in rows:
        now += 1 if row["phase"] == "start" else -1
        most = max(most, now)
    return most


def wait_for_ends(ledger: Ledger, count: int) -> list[dict[str, Any]]:
    def have_ended(found: Any) -> bool:
        return sum(row["phase"] == "end" for row in found) >= count

    ledger.wait(have_ended, f"{count} have ended", 60)
    return ledger.entries()


def test_a_worker_that_declares_nothing_obeys(start: Start, app: Celery, ledger: Ledger) -> None:
    """This is so even if it is the only one left, or was there first."""
    first = start("first")
    declaring = start("declaring", {"celery": ONE})
    wait_until_declared(app, ONE)
    send(app, "abcdefgh")
    wait_for_ends(ledger, 8)
    declaring.stop()
    send(app, "ijkl")
    wait_for_ends(ledger, 12)
    start("later")
    first.stop()
    send(app, "mnop")
    rows = wait_for_ends(ledger, 16)
    assert most_at_once(rows) == 1
    assert {row["worker"] for row in rows[16:24]} == {"first@test"}
    assert {row["worker"] for row in rows[24:]} == {"later@test"}


def test_the_worker_that_started_last_says_what_holds(
    start: Start, app: Celery, ledger: Ledger
) -> None:
    start("one", {"celery": ONE})
    start("two", {"celery": TWO, "other": []})
    wait_until_declared(app, TWO)
    send(app, "abcdefgh")
    assert most_at_once(wait_for_ends(ledger, 8)) == 2
    start("none", {"celery": []})
    wait_until_declared(app, [])
    send(app, "ijklmnop")
    assert most_at_once(wait_for_ends(ledger, 16)[16:]) > 2


def test_a_worker_without_the_code_leaves_the_queue_alone(
    start: Start, app: Celery, ledger: Ledger
) -> None:
    declaring = start("declaring", {"celery": BY_FUNCTION})
    wait_until_declared(app, BY_FUNCTION)
    declaring.stop()
    start("bare", queues=["celery", "other"])
    send(app, "abc")
    send(app, "xyz", "other")
    wait_for_ends(ledger, 3)
    assert {row["id"] for row in ledger.entries()} == {*"xyz"}
    worker = start("again", {"celery": BY_FUNCTION})
    wait_for_ends(ledger, 6)
    assert {row["worker"] for row in ledger.entries()[6:]} == {worker.name}


def test_who_cannot_obey_says_so_once(start: Start, app: Celery, ledger: Ledger) -> None:
    declaring = start("declaring", {"celery": BY_FUNCTION})
    wait_until_declared(app, BY_FUNCTION)
    declaring.stop()
    bare = start("bare", queues=["celery", "other"])
    send(app, "a")
    bare.wait_for_log("This consumer takes no messages from queue 'celery'", 30)
    bare.wait_for_log("function tests.kit.declaring_app:region is not known here")
    for n in range(5):
        app.send_task("late", task_id=f"x{n}", queue="other")
        app.send_task("late", task_id=f"y{n}")
    wait_for_ends(ledger, 5)
    assert bare.log.count("cannot apply its policies") == 1


def test_a_server_that_has_lost_them_is_told_again(
    start: Start, app: Celery, ledger: Ledger
) -> None:
    start("declaring", {"celery": ONE})
    send(app, "a")
    wait_for_ends(ledger, 1)
    store = app.delayed.store
    key = store.keys("celery").policies
    assert store.run("DEL", key) == 1
    send(app, "bcdefghi")
    assert most_at_once(wait_for_ends(ledger, 9)) == 1
    assert store.run("EXISTS", key) == 1


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_retries_are_those_of_redis(pool: str, start: Start, app: Celery) -> None:
    """This includes the processes of a pool, with or without a strategy of their own."""
    policies = [written(Backoff([0.05, 0.05]))]
    declaring = start("declaring", {"celery": policies})
    wait_until_declared(app, policies)
    declaring.stop()
    bare, dead = start("bare", pool=pool), app.delayed.dead
    app.send_task("add", (1, None), task_id="a")
    wait_until(lambda: dead.show("a"), "it has given up", 60)
    assert bare.log.count("add[a] retry") == 2
    assert app.delayed.policies.drop("celery")
    app.send_task("add", (1, None), task_id="b")
    bare.wait_for_log("add[b] raised unexpected", 30)
    assert dead.show("b") is None
    assert "add[b] retry" not in bare.log


def test_queues_that_only_policies_name(open_app: OpenApp) -> None:
    """An app need not list its queues: `apply` knows those to which it gives policies."""
    policies = {"calls": [Limit(concurrency=7)], "nights": [Limit(concurrency=2)]}
    app = open_app(Limit(concurrency=1))
    options = {**app.conf.broker_transport_options, "delayed_policies": policies}
    app.conf.broker_transport_options = options
    applied = {each.queue: each.policies for each in app.delayed.policies.apply()}
    assert {name: found[0]["Limit"]["concurrency"] for name, found in applied.items() if found} == {
        "calls": 7,
        "nights": 2,
    }


def test_queues_of_broadcasts_are_not_listed(open_app: OpenApp) -> None:
    """No message waits in one, and each process gives it another name."""
    app = open_app(Backoff(seconds=1), queue=ALL_QUEUES)
    app.amqp.queues.add(Broadcast("news"))
    assert [each.queue for each in app.delayed.policies()] == ["celery"]
    assert [*app.delayed.counts()] == ["celery"]
    assert HttpService(app).own_queues() == ["celery"]


def test_temporary_queues_have_none(open_app: OpenApp, client: redis.Redis, server: Server) -> None:
    """Queues for replies and remote control, for example: their keys would stay."""
    app = open_app(Limit(concurrency=1))
    assert take(app) is None
    app.control.ping(timeout=0.1)
    assert client.keys("*policies*") == []


def test_the_order_of_a_dict_changes_no_version(open_app: OpenApp) -> None:
    one = open_app(Fair(weights={"a": 1, "b": 2})).delayed.rules
    other = open_app(Fair(weights={"b": 2, "a": 1})).delayed.rules
    assert one.gate("celery") == other.gate("celery")
    assert one.declared("celery") == other.declared("celery")


def test_what_is_declared_once_a_process_is_not_again(open_app: OpenApp) -> None:
    """Otherwise a reconnect would replace a newer declaration with an older one."""
    app = open_app(Limit(concurrency=1))
    records = app.delayed.store.policies

    def consume() -> str:
        with (
            app.connection_for_read() as connection,
            Consumer(connection, [Queue("celery")]),
            suppress(TimeoutError),
        ):
            connection.drain_events(timeout=0.1)
        return records.read("celery").text

    ours = consume()
    assert '"concurrency":1' in ours
    theirs = ours.replace("1", "2")
    assert records.declare("celery", theirs, "another", records.read("celery"))
    assert consume() == theirs


def test_a_long_strategy_is_followed_without_its_code(open_app: OpenApp) -> None:
    """It is longer than the policies of a message may be."""
    open_app(Backoff([60 + n for n in range(1_500)])).delayed.policies.apply("celery")
    app = open_app()
    app.send_task("record", task_id="a")
    message = take(app)
    assert message is not None
    (strategy,) = strategies_in(message.headers) or ()
    assert isinstance(strategy, Backoff)
    assert strategy.retries == 1_500


def test_a_retry_does_not_carry_the_strategy(open_app: OpenApp) -> None:
    """Its consumer names the strategy again."""
    open_app(Backoff([60] * 3)).delayed.policies.apply("celery")
    app = open_app()

    @app.task(name="fails", shared=False)
    def fails() -> None:
        raise ValueError("no")

    id = fails.delay().id
    for _ in range(3):
        assert run_next(app) == states.RETRY
        assert strategies_in(app.delayed.get(id).headers) is None
    assert run_next(app) == states.FAILURE
