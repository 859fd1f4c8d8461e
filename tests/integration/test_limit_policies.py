"""Turns and limits over all workers together, through Celery and plain Kombu."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
import redis
from celery import Celery
from celery.contrib.testing.worker import start_worker
from kombu import Connection

from celery_ext.policies import (
    Delay,
    Drain,
    DropOlder,
    Fair,
    Limit,
    Message,
    Order,
    Policy,
    PolicyError,
    Run,
    Running,
    RunningTask,
    Shares,
    Throttler,
)
from celery_ext.policies.limits import throttler
from kombu_delayed.errors import OptionError
from kombu_delayed.inspection.gate_usage import holders
from tests.kit.policed import OpenApp
from tests.kit.servers import Server
from tests.kit.wait import wait_until


class Busy:
    """Counts running tasks by key, and remembers the order in which they began."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.order: list[str] = []

    def run(self, key: str, seconds: float = 0.01) -> None:
        with self._lock:
            self.order.append(key)
            self._now.update([key, ""])
            self.most |= self._now
        time.sleep(seconds)
        with self._lock:
            self._now.subtract([key, ""])


def gate_keys(client: redis.Redis) -> set[str]:
    names = {key.decode() for key in client.keys("*")}
    return {name for name in names if ":gate:" in name or name.endswith(":waiting")}


def names(channel: Any, count: int, no_ack: bool = False) -> list[Any]:
    """The first argument of each message taken, or None if there is none; nothing is acked."""
    found = (channel.basic_get("celery", no_ack=no_ack) for _ in range(count))
    return [each and each.decode()[0][0] for each in found]


def take(app: Celery, count: int, no_ack: bool = False) -> list[Any]:
    """Take the tasks that are available now; they return to the queue afterwards."""
    with app.connection_for_read() as connection:
        return [each for each in names(connection.default_channel, count, no_ack) if each]


@pytest.mark.parametrize("acks_late", [False, True])
def test_never_more_at_once_than_the_limits(
    open_app: OpenApp, client: redis.Redis, acks_late: bool
) -> None:
    app = open_app(Fair(), Limit(concurrency=2, by="tenant"), Limit(concurrency=3))
    busy = Busy()

    @app.task(name=f"busy-{acks_late}", shared=False, acks_late=acks_late)
    def task(key: str) -> None:
        busy.run(key)

    for n in range(30):
        task.apply_async([f"t{n % 2}"], headers={"tenant": f"t{n % 2}"}, countdown=n % 3 * 0.1)
    with start_worker(app, pool="threads", concurrency=8, perform_ping_check=False):
        wait_until(lambda: len(busy.order) == 30, "all have run")
        wait_until(lambda: not gate_keys(client), "nothing is left at the gate")
    assert busy.most[""] == 3
    assert max(busy.most[key] for key in ("t0", "t1")) == 2


def test_tenants_have_turns(open_app: OpenApp) -> None:
    app = open_app(Fair(weights={"b": 2}))
    for tenant, count in [("a", 9), ("b", 9), ("c", 1)]:
        for _ in range(count):
            app.send_task("record", [tenant], headers={"tenant": tenant})
    assert "".join(take(app, 10)) == "abcbabbabb"


def test_a_weight_of_a_number_is_that_of_its_text(open_app: OpenApp) -> None:
    app = open_app(Fair(by="customer", weights={7: 2}))
    for customer in (5, 7, 5, 7, 5, 7):
        app.send_task("record", [str(customer)], {"customer": customer})
    assert "".join(take(app, 6)) == "577575"


def test_failures_retries_and_rejects_give_their_slots_back(
    open_app: OpenApp, client: redis.Redis
) -> None:
    app = open_app(Limit(concurrency=1))
    ended: list[int] = []

    @app.task(bind=True, name="fail", shared=False, max_retries=1, default_retry_delay=0.01)
    def fail(self: Any, n: int) -> None:
        ended.append(n)
        if n % 2:
            raise ValueError("no")
        raise self.retry()

    for n in range(4):
        fail.delay(n)
    with start_worker(app, pool="solo", perform_ping_check=False):
        wait_until(lambda: len(ended) == 6, "all have run")
        wait_until(lambda: not gate_keys(client), "nothing is left at the gate")


@pytest.mark.parametrize("options", [{}, {"delayed_shards": 3}])
def test_a_gate_without_policies_any_more_is_emptied(
    open_app: OpenApp, options: dict[str, Any]
) -> None:
    app = open_app(Limit(concurrency=1))
    for n in range(9):
        app.send_task("record", [str(n)])
    with app.connection_for_read() as connection:
        assert names(connection.default_channel, 2) == ["0", None]
    assert sorted(take(open_app(**options), 10)) == [*"012345678"]


def test_takers_without_ack_meet_limits_and_use_none(open_app: OpenApp) -> None:
    app = open_app(Limit(concurrency=1))
    for id in "abc":
        app.send_task("record", [id])
    assert take(app, 2, no_ack=True) == ["a", "b"]
    with app.connection_for_read() as connection:
        assert names(connection.default_channel, 1) == ["c"]
        assert take(app, 1, no_ack=True) == []


def test_messages_of_other_producers_get_a_ticket(open_app: OpenApp, server: Server) -> None:
    app = open_app(Limit(concurrency=2))
    with Connection(server.url) as stock:
        for n in range(4):
            headers = {"task": "record", "id": str(n)}
            stock.SimpleQueue("celery").put([[str(n)], {}, {}], headers=headers)
    with app.connection_for_read() as connection:
        assert names(connection.default_channel, 4) == ["0", "1", None, None]


def test_a_task_has_limits_of_its_own(open_app: OpenApp) -> None:
    app = open_app()

    @app.task(name="scarce", shared=False, policies=[Limit(concurrency=1)])
    def scarce(name: str) -> None: ...

    for _ in range(3):
        scarce.delay("scarce")
        app.send_task("record", ["record"])
    with app.connection_for_read() as connection:
        found = Counter(names(connection.default_channel, 5))
    assert found == {"record": 3, "scarce": 1, None: 1}


def test_turns_are_not_for_tasks(open_app: OpenApp) -> None:
    app = open_app(delayed_poll_seconds=4.0)  # Kombu would share connections with other tests

    @app.task(name="unfair", shared=False, policies=[Fair()])
    def unfair() -> None: ...

    with pytest.raises(PolicyError, match="task unfair"):
        unfair.delay()


def test_order_by_priority(open_app: OpenApp) -> None:
    app = open_app(Order("priority", "due", by="urgency", urgent="high"))
    for urgency in (5, -7, 1_000_000, 5):
        app.send_task("record", [str(urgency)], headers={"urgency": urgency})
    assert take(app, 4) == ["1000000", "5", "5", "-7"]


def test_weights_and_critical_ones(open_app: OpenApp) -> None:
    app = open_app(Limit(concurrency=3, weight="size", critical="urgent"))
    for name, size in {"urgent": 2, "light": 0, "a": 2, "b": 2}.items():
        app.send_task("record", [name], headers={"size": size, "urgent": name == "urgent"})
    with app.connection_for_read() as connection:
        found = names(connection.default_channel, 4)
    assert (sorted(filter(None, found)), found[-1]) == (["a", "light", "urgent"], None)


@pytest.mark.parametrize("kind", [float, Decimal, Fraction])
def test_a_fraction_is_a_weight(open_app: OpenApp, kind: Callable[[float], Any]) -> None:
    app = open_app(Limit(concurrency=2, weight=lambda message: kind(message.headers["size"])))
    for name, size in {"a": 0.25, "b": 0.5, "c": 0.5}.items():
        app.send_task("record", [name], headers={"size": size})
    with app.connection_for_read() as connection:
        assert names(connection.default_channel, 3) == ["a", "b", None]


def test_a_negative_weight_opens_no_limit(open_app: OpenApp) -> None:
    """The message waits, as with any weight that cannot be read."""
    app = open_app(Limit(concurrency=1, weight="size"))
    for name, size in {"a": 1, "b": -1, "c": -0.5}.items():
        app.send_task("record", [name], headers={"size": size})
    with app.connection_for_read() as connection:
        assert names(connection.default_channel, 3) == ["a", None, None]


def test_shares(open_app: OpenApp) -> None:
    app = open_app(Shares(4, {"east": 0.5, "west": 0.25}, by="region", borrow=False))
    for region in ("east", "west", "north") * 4:
        app.send_task("record", [region], headers={"region": region})
    with app.connection_for_read() as connection:
        taken = Counter(names(connection.default_channel, 6))
    assert taken == {"east": 2, "west": 1, "north": 1, None: 2}


class OneOfATenant(Throttler):
    """Allows a tenant one task at a time, and puts the counts it is given into its reason."""

    def decide(self, message: Message, running: Running) -> Any:  # type: ignore[override]
        if running.of_tenant(message.tenant or ""):
            reason = f"{running.total} run, {running.of_limit('queue')} slots are taken"
            return Delay(message.now_ms + 3_600_000, reason)
        return Run()


def test_a_throttler_knows_what_runs(open_app: OpenApp) -> None:
    """The message that it is asked about is not included."""
    app = open_app(Limit(concurrency=9, weight=2), OneOfATenant())
    for id, tenant in ("a", "x"), ("b", "x"), ("c", "y"):
        app.send_task("record", [id], task_id=id, headers={"tenant": tenant})
    with app.connection_for_read() as connection:
        assert names(connection.default_channel, 3) == ["a", "c", None]
        assert app.delayed.get("b").reason == "1 run, 2 slots are taken"


class Sees(Throttler):
    """Remembers its input."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def decide(self, message: Message, running: Running) -> Any:  # type: ignore[override]
        self.seen.append(sorted(running.tasks(), key=lambda each: each.id))
        return Run()


def test_a_throttler_sees_the_tasks(open_app: OpenApp, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(throttler, "monotonic", lambda: clock[0])
    policy = Sees()
    app = open_app(Limit(concurrency=9, weight="size", by="host"), policy)
    with app.connection_for_read() as connection:
        channel = connection.default_channel
        for id in ("a|*é", "b", "c", "d"):
            headers = {"tenant": "x", "host": f"h|{id}", "size": 2}
            app.send_task("record", [id], task_id=id, headers=headers)
            assert names(channel, 1) == [id]
            if id == "b":
                channel.qos.slots.free(2)
                channel.flush()
            else:
                clock[0] += throttler.TASKS_SECONDS
        app.send_task("record", ["e"], task_id="e")
        assert names(channel, 1) == ["e"]
        worker = channel.consumer.lease.consumer.rsplit(":", 2)[0]
    first, second, third, fourth, last = policy.seen
    assert (first, [each.id for each in second]) == ([], ["a|*é"])
    assert [each.id for each in third] == ["a|*é", "b"]  # as for the second, though it has ended
    assert [each.id for each in fourth] == ["a|*é", "c"]
    assert [each.id for each in last] == ["a|*é", "c", "d"]
    (seen,) = second
    since = time.time() * 1000 - seen.since_ms
    assert seen == RunningTask(
        "a|*é", "record", "celery", "x", worker, seen.since_ms, {"host": "h|a|*é"}, {"host": 2}
    )
    assert -60_000 < since < 600_000


@pytest.mark.parametrize("acks_late", [False, True])
def test_a_worker_s_throttler_sees_what_runs(
    open_app: OpenApp, monkeypatch: pytest.MonkeyPatch, acks_late: bool
) -> None:
    monkeypatch.setattr(throttler, "TASKS_SECONDS", 0.0)
    policy, may_end, begun = Sees(), threading.Event(), threading.Semaphore(0)
    app = open_app(policy)

    @app.task(name=f"sees-{acks_late}", shared=False, acks_late=acks_late)
    def task() -> None:
        begun.release()
        may_end.wait(30)

    first = task.delay()
    with start_worker(app, pool="threads", concurrency=2, perform_ping_check=False):
        assert begun.acquire(timeout=30)
        second = task.delay()
        assert begun.acquire(timeout=30)
        seen = policy.seen[-1]
        may_end.set()
        second.get(timeout=30)
        wait_until(lambda: not holders(app.delayed.store, "celery", 9), "nothing runs any more")
    assert [(each.id, each.task) for each in seen] == [(first.id, task.name)]


def test_so_many_tasks_at_the_most(open_app: OpenApp, client: redis.Redis) -> None:
    app = open_app(Sees())
    store = app.delayed.store
    for consumer in ("w1@a:1:x", "w1@b:1:x"):
        client.zadd("{celery}:consumers", {consumer: 10**15})
        texts = {n: f"{consumer[3]}{n}@{n}|running%20task:t*1" for n in range(3)}
        client.hset(f"{{celery}}:gate:slots:{consumer}", mapping=texts)
    client.hset("{celery}:gate:slots:w1@b:1:x", "1", "|running%20task:t*1")  # of an older version
    assert len(holders(store, "celery", 4)) == 4
    found = holders(store, "celery", 9)
    assert {each.id for each in found} == {"a0", "a1", "a2", "b0", "", "b2"}
    (old,) = [RunningTask.of("q", each) for each in found if not each.id]
    assert old == RunningTask("", "t", "q", None, "w1@b", None, {}, {})


def test_a_lost_answer_takes_no_slots(
    open_app: OpenApp, monkeypatch: pytest.MonkeyPatch, client: redis.Redis
) -> None:
    app = open_app(Limit(concurrency=1))
    app.send_task("record", task_id="a")
    with app.connection_for_read() as connection:
        channel = connection.default_channel
        assert channel.basic_get("other") is None
        store = channel.consumer.store
        deliver = store.deliver

        def lost(*given: Any, **named: Any) -> Any:
            answer = deliver(*given, **named)
            if answer.refused:  # this consumer learns the policies first
                return answer
            raise redis.ConnectionError("the answer is lost")

        monkeypatch.setattr(store, "deliver", lost)
        with pytest.raises(redis.ConnectionError):
            channel.basic_get("celery")
        assert client.hgetall("{celery}:gate:slots") == {b"queue:": b"1"}
        monkeypatch.undo()
        found = channel.basic_get("celery")
        assert found.headers["id"] == "a"
        found.ack()
        wait_until(lambda: not gate_keys(client), "nothing is left at the gate")


def test_limits_that_change_hold_for_what_waits(open_app: OpenApp) -> None:
    app = open_app(Limit(concurrency=1))
    for n in range(8):
        app.send_task("record", [str(n)], headers={"customer": f"c{n % 2}"})
    with app.connection_for_read() as connection:
        assert names(connection.default_channel, 2) == ["0", None]
        changed = open_app(Limit(concurrency=3, by="customer"))
        with changed.connection_for_read() as other:
            assert names(other.default_channel, 7) == [*"123456", None]


def take_late(app: Celery, count: int) -> list[Any]:
    """Take the tasks that are available two hours from now."""
    with app.connection_for_read() as connection:
        connection.default_channel.store.now = "+7200000"
        return [each for each in names(connection.default_channel, count) if each]


def test_late_ones_are_drained(open_app: OpenApp) -> None:
    app = open_app(Drain("1/h", after="1h", burst=2))
    for n in range(4):
        app.send_task("record", [str(n)], countdown=60)
    app.send_task("record", ["in time"], countdown=7_000)
    assert take_late(app, 5) == ["0", "1", "in time"]


@pytest.mark.parametrize("others", [[], [DropOlder("6h")]], ids=["alone", "DropOlder"])
def test_tasks_for_now_are_late_as_well(open_app: OpenApp, others: list[Policy]) -> None:
    """They have been in their queue since they were sent, with or without a worker."""
    app = open_app(*others, Drain("1/h", after="1h", burst=2))
    for n in range(4):
        app.send_task("record", [str(n)])
    app.send_task("record", ["in time"], countdown=7_000)
    assert take_late(app, 5) == ["0", "1", "in time"]


@pytest.mark.parametrize(
    ("policies", "words"),
    [
        (lambda: [Limit()], "concurrency"),
        (lambda: [Limit(rate="often")], "such as"),
        (lambda: [Limit(concurrency=0)], "whole number"),
        (lambda: [Limit(concurrency=1, name=7)], "takes text"),
        (lambda: [Limit(concurrency=1, burst=10)], r"burst=10\) has an effect only with rate"),
        (lambda: [Shares(10, {"a": 0.7, "b": 0.7})], "sum is at most 1"),
        (lambda: [Shares(10, {"a": "half"})], "dict of fractions"),
        (lambda: [Shares(10, {"a": math.nan})], "dict of fractions"),
        (lambda: [Shares(10, ["a", "b"])], "dict of fractions"),
        (lambda: [Shares(10, {"a": 1}, borrow="no")], "takes True or False"),  # type: ignore[arg-type]
        (lambda: [Order("due")], "in their order"),
        (lambda: [Fair(weights={"a": 0})], "weight of 'a'"),
        (lambda: [Fair(weights=3)], "a dict or a function"),
    ],
)
def test_nonsense_is_refused_where_it_is_declared(
    policies: Callable[[], list[Policy]], words: str
) -> None:
    with pytest.raises(PolicyError, match=words):
        policies()


def shares(message: Message) -> str:
    return str(message.headers.get("share"))


@pytest.mark.parametrize(
    "policies",
    [
        [Fair(), Fair()],
        [Limit(concurrency=1), Limit(concurrency=2)],
        [Fair(), Shares(1, {"a": 1})],
        [Order("due", "priority"), Order("due", "priority")],
        [Drain("1/s"), Drain("2/s")],
        [Drain("1/s"), Limit(concurrency=1, name="late")],
        [Limit(concurrency=1, by=shares), Shares(1, {"a": 1})],
    ],
)
def test_contradictions_name_the_queue(open_app: OpenApp, policies: list[Policy]) -> None:
    with pytest.raises(PolicyError, match="celery"):
        open_app(*policies).send_task("record")


def test_a_queue_with_limits_has_one_shard(open_app: OpenApp) -> None:
    app = open_app(Limit(concurrency=1), delayed_shards=3)
    with pytest.raises(OptionError, match="3 shards"):
        app.send_task("record")
