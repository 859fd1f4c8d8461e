"""One limit over queues, shards, workers and the nodes of a Cluster, with real workers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import redis
from celery import Celery
from celery.contrib.testing.worker import start_worker
from kombu import Connection

from celery_ext import install
from celery_ext.policies import Fair, Limit, Order, PolicyError, written
from kombu_delayed.consumer import consumer
from kombu_delayed.errors import OptionError
from kombu_delayed.inspection.backlog import queues as queues_of
from kombu_delayed.inspection.gate_usage import slots_in_use
from kombu_delayed.store.global_limits import pool_of
from kombu_delayed.store.store import Store
from tests.kit.clusters import Cluster
from tests.kit.extended import Bench
from tests.kit.global_app import SLOTS, make_global_app
from tests.kit.inbox import Inbox
from tests.kit.ledger import Entry, Ledger
from tests.kit.mail import MAIL, publish
from tests.kit.policed import OpenApp
from tests.kit.proxy import Proxy
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

pytestmark = pytest.mark.thorough

PROVIDER = Limit(concurrency=SLOTS, name="provider", scope="global")
POOL = pool_of("global%2Fprovider")
SLOT = "global%2Fprovider:"
SHARDS = {"delayed_shards": {"calls": 6}, "delayed_lease_seconds": 1}


def most_at_once(entries: list[Entry]) -> int:
    most = running = 0
    for entry in entries:
        running += 1 if entry["at"] == "begin" else -1
        most = max(most, running)
    return most


def all_ended(count: int) -> Callable[[list[Entry]], bool]:
    return lambda entries: sum(each["at"] == "end" for each in entries) == count


def run_all(app: Celery, settings: Settings, directory: Path, ledger: Ledger) -> list[Entry]:
    """Run the tasks of both queues, with a worker for each that has room for the whole limit."""
    with app, ExitStack() as stack:
        workers = [
            Worker(
                settings,
                directory,
                name=queue,
                module="tests.kit.global_app",
                pool="threads",
                concurrency=6,
                queues=[queue],
            )
            for queue in ("calls", "mails")
        ]
        for worker in workers:
            worker.start(wait=False)
            stack.callback(worker.kill)
        for worker in workers:
            worker.wait_until_ready()
        for n in range(30):
            for queue in ("calls", "mails"):
                app.send_task("ask", [0.05], queue=queue, task_id=f"{queue}-{n}")
        entries = ledger.wait(all_ended(60), "all have run")
        assert [worker.stop() for worker in workers] == [0, 0]
        stack.pop_all()
        return entries


def check(entries: list[Entry]) -> None:
    assert most_at_once(entries) == SLOTS
    assert Counter(each["id"] for each in entries) == {
        f"{queue}-{n}": 2 for queue in ("calls", "mails") for n in range(30)
    }
    # While both have waiting tasks, neither has all slots.
    begins = [each["queue"] for each in entries if each["at"] == "begin"]
    first = max(begins.index("calls"), begins.index("mails"))
    together = Counter(begins[first : first + 30])
    assert min(together.values()) >= 8, together


def test_over_queues_shards_and_workers(bench: Bench, tmp_path: Path, store: Store) -> None:
    options = {**bench.settings.transport_options, **SHARDS}
    settings = Settings(bench.settings.broker_url, None, options, bench.settings.ledger)
    app = make_global_app(settings)
    check(run_all(app, settings, tmp_path, bench.ledger))
    assert slots_in_use(store, POOL) == {}
    assert POOL not in queues_of(store)


def test_over_the_nodes_of_a_cluster(cluster: Cluster, tmp_path: Path, ledger: Ledger) -> None:
    settings = Settings(f"delayed+{cluster.url}", None, SHARDS, str(ledger.path))
    check(run_all(make_global_app(settings), settings, tmp_path, ledger))


def test_slots_of_a_killed_worker(bench: Bench, tmp_path: Path) -> None:
    """Another worker gets them when its lease has expired; its tasks run again."""
    options = {**bench.settings.transport_options, **SHARDS}
    settings = Settings(
        bench.settings.broker_url, None, options, bench.settings.ledger, {"task_acks_late": True}
    )
    go, ledger = tmp_path / "go", bench.ledger
    of_worker: dict[str, Any] = {"module": "tests.kit.global_app", "pool": "threads"}
    with make_global_app(settings) as app, ExitStack() as stack:
        for n in range(4):
            app.send_task("ask", [], {"go": str(go)}, queue="calls", task_id=f"calls-{n}")
        killed = Worker(settings, tmp_path, name="w1", concurrency=6, queues=["calls"], **of_worker)
        killed.start()
        ledger.wait(lambda entries: len(entries) == SLOTS, "it has all slots")
        app.send_task("ask", queue="mails", task_id="mails")
        queues = ["mails", "calls"]
        other = Worker(settings, tmp_path, name="w2", concurrency=6, queues=queues, **of_worker)
        stack.callback(other.kill)
        other.start()
        pid = killed.pid
        killed.kill()
        go.touch()
        ledger.wait(all_ended(5), "the other one runs all of them")
        before = [entry for entry in ledger.entries() if entry["pid"] == pid]
        assert len(before) == SLOTS
        after = ledger.entries()[SLOTS:]
        assert most_at_once(after) <= SLOTS
        assert {entry["id"] for entry in after} == {"mails", *(f"calls-{n}" for n in range(4))}


def test_a_lower_limit_is_for_what_workers_have_claimed(bench: Bench, tmp_path: Path) -> None:
    """Also in a queue other than the one that it was set through."""
    app, go = make_global_app(bench.settings), tmp_path / "go"
    more = ("--prefetch-multiplier", str(SLOTS))
    of_worker: dict[str, Any] = {"module": "tests.kit.global_app", "pool": "threads"}
    with app, bench.worker(queues=["calls", "mails"], options=more, **of_worker):
        bench.wait_for_answers()
        app.send_task("ask", [], {"go": str(go)}, queue="calls", task_id="first")
        bench.ledger.wait_for(1)
        for n in range(SLOTS - 1):
            app.send_task("ask", queue="mails", task_id=f"mails-{n}")
        delayed = app.delayed  # type: ignore[attr-defined]
        wait_until(lambda: delayed.limits("calls")[0].in_use == SLOTS, "it has claimed all of them")
        delayed.set_limit("calls", "global/provider", concurrency=1)
        wait_until(
            lambda: delayed.limits("calls")[0].in_use == 1,
            "it has returned those that have not started",
            30,
        )
        go.touch()
        bench.ledger.wait(all_ended(SLOTS), "all have run once")


def reconnect(proxy: Proxy, store: Store) -> None:
    """Break the worker's connection, and wait until it consumes over another channel."""
    (old,) = [name for name, _, _ in store.leases.consumers(POOL)]
    proxy.cut()
    proxy.heal()
    wait_until(
        lambda: {name for name, _, _ in store.leases.consumers("celery")} - {old},
        "the worker has another channel",
    )


@pytest.mark.parametrize("acks_late", [False, True])
def test_tasks_that_outlive_their_connection_keep_their_slots(
    proxy: Proxy, store: Store, acks_late: bool
) -> None:
    limit = Limit(concurrency=2, name="provider", scope="global")
    options = {"delayed_policies": {"celery": [limit]}, "delayed_reconnect_seconds": 0}
    app = make_app(Settings(f"delayed+redis://127.0.0.1:{proxy.port}/0", None, options))
    begun: list[str] = []
    may_end = {name: threading.Event() for name in ("a", "b", "c")}

    @app.task(name="waits", shared=False, acks_late=acks_late)
    def waits(name: str) -> None:
        begun.append(name)
        may_end[name].wait(30)

    with app, ExitStack() as stack:
        stack.callback(install(app).close)
        for name in may_end:
            stack.callback(may_end[name].set)
        stack.enter_context(
            start_worker(app, pool="threads", concurrency=4, perform_ping_check=False)
        )
        for name in ("a", "b"):
            waits.delay(name)
        wait_until(lambda: sorted(begun) == ["a", "b"], "two run")
        # An ack that is on its way would be lost: they would run again.
        held = 2 if acks_late else 0
        wait_until(lambda: store.metrics("celery").unacked == held, "acks have arrived")
        reconnect(proxy, store)
        assert slots_in_use(store, POOL) == {SLOT: 2}
        if not acks_late:
            waits.delay("c")
            wait_until(lambda: bool(store.run("EXISTS", "{celery}:gate:looks")), "it waits")
            assert sorted(begun) == ["a", "b"]
        may_end["a"].set()
        if not acks_late:
            wait_until(lambda: sorted(begun) == ["a", "b", "c"], "the first one has ended")
        for each in may_end.values():
            each.set()
        wait_until(lambda: slots_in_use(store, POOL) == {}, "all have ended")


@pytest.mark.parametrize("is_back_at_once", [True, False])
def test_a_lost_connection_frees_what_has_not_begun(
    proxy: Proxy, store: Store, monkeypatch: pytest.MonkeyPatch, is_back_at_once: bool
) -> None:
    """A worker has claimed two tasks and can run one: the slot of the other is not lost."""
    limit = Limit(concurrency=2, name="provider", scope="global")
    options = {
        "delayed_policies": {"celery": [limit]},
        "delayed_reconnect_seconds": 0,
        "delayed_lease_seconds": 600,  # no lease expires
    }
    app = make_app(Settings(f"delayed+redis://127.0.0.1:{proxy.port}/0", None, options))
    app.conf.worker_prefetch_multiplier = 4
    begun: list[str] = []
    may_end = threading.Event()

    @app.task(name="waits", shared=False)
    def waits(name: str) -> None:
        begun.append(name)
        may_end.wait(30)

    with app, ExitStack() as stack:
        stack.callback(install(app).close)
        stack.callback(may_end.set)
        stack.enter_context(
            start_worker(app, pool="threads", concurrency=1, perform_ping_check=False)
        )
        for name in ("a", "b"):
            waits.delay(name)
        wait_until(lambda: len(begun) == 1, "one runs")
        wait_until(lambda: slots_in_use(store, POOL) == {SLOT: 2}, "the other one is claimed")
        wait_until(lambda: store.metrics("celery").unacked == 1, "the ack has arrived")
        if not is_back_at_once:
            warn = Mock()
            monkeypatch.setattr(consumer.logger, "warning", warn)
            proxy.cut()
            wait_until(lambda: "stops without" in str(warn.mock_calls), "its channel is closed")
        reconnect(proxy, store)
        may_end.set()
        wait_until(lambda: len(begun) == 2, "the other one runs")
        wait_until(lambda: slots_in_use(store, POOL) == {}, "no slot is left")


def test_messages_that_are_taken_by_hand(connect: Callable[..., Connection], store: Store) -> None:
    limit = Limit(concurrency=1, name="provider", scope="global")
    connection = connect(delayed_policies={"q": [limit], "r": [limit]})
    for queue in ("q", "q", "r"):
        connection.SimpleQueue(queue).put("x")
    channel = connection.default_channel
    first = channel.basic_get("q")
    assert first is not None
    assert channel.basic_get("q") is None
    assert channel.basic_get("r", no_ack=True) is None
    first.ack()
    # It is q's turn until q fails to take it. A `no_ack` take occupies no slot.
    wait_until(lambda: channel.basic_get("r", no_ack=True) is not None, "there is a slot")
    wait_until(lambda: channel.basic_get("q", no_ack=True) is not None, "there is a slot")
    channel.close()
    assert slots_in_use(store, POOL) == {}


class OlderLimit(Limit):
    """A limit of a version that has no global limits."""

    def __init__(self, *, concurrency: int, name: str) -> None:
        super().__init__(concurrency=concurrency, name=name)


def test_a_worker_of_a_version_without_them_leaves_the_queue_alone(
    connect: Callable[..., Connection],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    new = connect(delayed_policies={"mail": [PROVIDER]})
    inbox = Inbox(new, MAIL)
    publish(new, "x")
    inbox.receive(1)
    publish(new, "y")
    monkeypatch.setitem(written.KINDS, "Limit", OlderLimit)
    old = connect()
    assert old.default_channel.basic_get("mail") is None
    assert "takes no messages from queue 'mail'" in caplog.text


def test_what_was_not_acked_frees_its_slot_with_the_channel(
    connect: Callable[..., Connection], store: Store
) -> None:
    connection = connect(delayed_policies={"q": [PROVIDER]})
    for _ in range(2):
        connection.SimpleQueue("q").put("x")
    channel = connection.default_channel
    assert channel.basic_get("q") is not None
    assert slots_in_use(store, POOL) == {SLOT: 1}
    channel.close()
    assert slots_in_use(store, POOL) == {}
    assert store.leases.consumers(POOL) == []


def test_what_has_not_begun_frees_its_slot_with_the_channel(
    connect: Callable[..., Connection], store: Store
) -> None:
    """Its program would say when it begins, and when it ends, which it never does."""
    connection = connect(delayed_policies={"mail": [PROVIDER]})
    inbox = Inbox(connection, MAIL, prefetch_count=5, ack=False)
    publish(connection, "begun", "waits")
    inbox.receive(2)
    channel, (begun, waits) = inbox.consumer.channel, inbox.messages
    for message in (begun, waits):
        assert channel.handed_out.waits(message.delivery_tag)
    assert channel.handed_out.begins(begun.delivery_tag)
    channel.close()
    assert slots_in_use(store, POOL) == {SLOT: 1}
    channel.handed_out.has_ended(begun.delivery_tag)
    wait_until(lambda: store.leases.consumers(POOL) == [], "the other one has ended, too")


def test_a_claim_that_fails_halfway_takes_its_slots_once(
    connect: Callable[..., Connection], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It brings a message with a slot and one without a ticket, which cannot be sent to wait."""
    limited, other = connect(delayed_policies={"mail": [PROVIDER]}), connect()
    make_ready, admit = consumer.Consumer._make_ready, Store.admit
    lost: list[str] = []

    def publish_another(self: Any, queue: str) -> bool:
        if not lost:
            publish(other, "without a ticket")
        return make_ready(self, queue)

    def lose_the_connection(self: Store, queue: str, *given: Any) -> int:
        if not lost:
            lost.append(queue)
            raise redis.ConnectionError("lost")
        return admit(self, queue, *given)

    monkeypatch.setattr(consumer.Consumer, "_make_ready", publish_another)
    monkeypatch.setattr(Store, "admit", lose_the_connection)
    inbox = Inbox(limited, MAIL, prefetch_count=5)
    publish(limited, "with a slot")
    assert sorted(inbox.receive(2)) == ["with a slot", "without a ticket"]
    assert lost
    wait_until(lambda: inbox.drain(0.01) and slots_in_use(store, POOL) == {}, "all are back")


def test_what_is_shown_and_set(open_app: OpenApp, store: Store) -> None:
    app = open_app(PROVIDER)
    app.send_task("noop")
    app.send_task("noop")
    found = app.delayed.set_limit("celery", "global/provider", concurrency=1, by="ann")
    assert (found.capacity, found.declared_capacity, found.set_by) == (1, SLOTS, "ann")
    with app.connection_for_read() as connection:
        channel = connection.default_channel
        assert channel.basic_get("celery") is not None
        assert channel.basic_get("celery") is None
        (limit,) = app.delayed.limits("celery")
        assert (limit.name, limit.in_use, limit.waiting) == ("global/provider", 1, 1)
        assert app.delayed.reset_limit("celery")
        assert channel.basic_get("celery") is not None


def test_its_queue_and_its_task_have_it(open_app: OpenApp, store: Store) -> None:
    app = open_app(PROVIDER)

    @app.task(name="mine", shared=False, policies=[PROVIDER])
    def mine() -> None: ...

    app.send_task("mine")
    with app.connection_for_read() as connection:
        assert connection.default_channel.basic_get("celery") is not None
        assert slots_in_use(store, POOL) == {SLOT: 1}


def test_what_weighs_nothing_or_is_critical_takes_none(open_app: OpenApp, store: Store) -> None:
    full = Limit(concurrency=1, name="provider", scope="global", weight="weighs", critical="now")
    app = open_app(full)
    for given in ({}, {"weighs": 0}, {"now": True}):
        app.send_task("noop", kwargs=given)
    with app.connection_for_read() as connection:
        channel = connection.default_channel
        found = [channel.basic_get("celery") for _ in range(3)]
        assert all(found)
        assert slots_in_use(store, POOL) == {SLOT: 1}


def test_what_goes_back_or_is_rejected_frees_its_slot(open_app: OpenApp, store: Store) -> None:
    app = open_app(Limit(concurrency=1, name="provider", scope="global"))
    app.send_task("noop")
    with app.connection_for_read() as connection:
        channel = connection.default_channel
        for requeue in (True, True, False):
            message = channel.basic_get("celery")
            assert message is not None
            assert slots_in_use(store, POOL) == {SLOT: 1}
            message.reject(requeue=requeue)
            assert slots_in_use(store, POOL) == {}
        assert channel.basic_get("celery") is None


def test_a_paused_queue_holds_no_slots(open_app: OpenApp, store: Store) -> None:
    app = open_app(Limit(concurrency=1, name="provider", scope="global"))
    app.send_task("noop")
    app.delayed.pause("celery")
    with app.connection_for_read() as connection:
        channel = connection.default_channel
        assert channel.basic_get("celery") is None
        assert slots_in_use(store, POOL) == {}
        app.delayed.resume("celery")
        assert channel.basic_get("celery") is not None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"concurrency": 1, "scope": "global"}, "takes a name"),
        ({"rate": "1/s", "name": "a", "scope": "global"}, "no rate"),
        ({"concurrency": 1, "name": "a", "scope": "all"}, "takes 'queue' or 'global'"),
    ],
)
def test_what_is_invalid(given: dict[str, Any], said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        Limit(**given)


def test_one_limit_has_one_size(connect: Callable[..., Connection]) -> None:
    other = Limit(concurrency=9, name="provider", scope="global")
    connection = connect(delayed_policies={"q": [PROVIDER], "r": [other]})
    with pytest.raises(PolicyError, match="concurrency of 9 here, and of 3 elsewhere"):
        connection.default_channel.basic_get("q")


def test_a_message_takes_slots_of_one(connect: Callable[..., Connection]) -> None:
    """Two consumers that each have one of two would wait for each other."""
    other = Limit(concurrency=1, name="other", scope="global")
    connection = connect(delayed_policies={"q": [PROVIDER, other]})
    with pytest.raises(PolicyError, match=r"'q' has .*other.*provider.* slots of one"):
        connection.default_channel.basic_get("q")


@pytest.mark.parametrize("policy", [Limit(concurrency=1), Order("due", "priority")])
def test_a_spread_queue_has_only_global_ones(
    connect: Callable[..., Connection], policy: Any
) -> None:
    own = [PROVIDER, Fair(), policy]
    connection = connect(delayed_policies={"q": own}, delayed_shards={"q": 3})
    with pytest.raises(OptionError, match="scope='global'"):
        connection.SimpleQueue("q").get(block=False)


def test_no_answer_from_the_server_of_a_limit(
    connect: Callable[..., Connection], client: redis.Redis
) -> None:
    """Lost data is reported again: others do not get slots that are in use."""
    limit = Limit(concurrency=1, name="provider", scope="global")
    options: dict[str, Any] = {"delayed_policies": {"q": [limit]}, "delayed_lease_seconds": 30}
    one, two = connect(**options), connect(**options)
    for _ in range(3):
        one.SimpleQueue("q").put("x")
    first = one.default_channel.basic_get("q")
    assert first is not None
    client.delete(*client.keys(f"{{{POOL}}}:*"))
    first.ack()
    wait_until(lambda: one.default_channel.basic_get("q") is not None, "there is a slot")
    assert two.default_channel.basic_get("q") is None
