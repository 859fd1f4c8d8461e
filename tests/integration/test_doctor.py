"""The doctor's findings beside the backlog: dead letters, names, tokens that nobody takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import redis
from kombu import Consumer, Queue

from celery_ext.http.service.create_once import KEPT_SECONDS, OnceStore
from kombu_delayed.errors import MessageError
from kombu_delayed.inspection.backlog import Backlog
from kombu_delayed.inspection.doctor import consumers, examination, examine_queues
from kombu_delayed.inspection.doctor.messages import Messages
from kombu_delayed.store.calls.shards import shard_name
from kombu_delayed.store.store import Store
from tests.kit.claims import deliver
from tests.kit.inbox import Connect, Inbox
from tests.kit.state import dead_state, entry, note, state

LOST = "why it was buried is lost"
LEDGERS = "{q}:ledgers-until"


@pytest.fixture(autouse=True)
def _time_stands_still(store: Store) -> None:
    store.now = "1000"


def examine(store: Store, fix: bool = False) -> dict[str, tuple[int, int]]:
    """Return kind of fault -> how many there are, and how many were repaired."""
    found = examine_queues(store, ["q"], fix=fix, patience_seconds=0)
    assert all(each.examples and each.meaning and each.remedy for each in found)
    return {each.kind: (each.count, each.fixed) for each in found}


def wrong(store: Store) -> set[str]:
    found = examine_queues(store, ["q"], patience_seconds=0)
    return {each.kind for each in found if each.is_wrong}


# Dead letters.

DEAD, MESSAGES, REASONS = "{q}:dead", "{q}:dead-messages", "{q}:dead-reasons"


def bury(store: Store, *ids: str) -> None:
    store.bury("q", "A", [(0, id, "because", f"0{id} is no JSON".encode()) for id in ids])


@pytest.mark.parametrize("page", [1, 200])
@pytest.mark.parametrize(
    ("damage", "fault", "left"),
    [
        (lambda client: client.hdel(MESSAGES, "b"), "dead-lost", ("a", "c")),
        (lambda client: client.delete(MESSAGES), "dead-lost", ()),
        (lambda client: (client.hdel(MESSAGES, "b"), client.zrem(DEAD, "b")), "dead-lost", "ac"),
        (lambda client: (client.hdel(MESSAGES, "b"), client.hdel(REASONS, "b")), "dead-lost", "ac"),
        (lambda client: client.zrem(DEAD, "b"), "dead-orphan", "abc"),
        (lambda client: client.delete(DEAD), "dead-orphan", "abc"),
    ],
)
def test_dead_letters_that_are_not_whole(
    damage: Callable[[redis.Redis], Any],
    fault: str,
    left: Any,
    page: int,
    store: Store,
    client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(examination, "PAGE_SIZE", page)
    bury(store, *"abc")
    assert examine(store) == {}
    damage(client)
    before = state(client)
    (kind, (count, fixed)) = examine(store).popitem()
    assert (kind, fixed) == (fault, 0)
    assert count == (1 if client.exists(DEAD, MESSAGES) == 2 else 3)
    assert state(client) == before
    assert examine(store, fix=True) == {fault: (count, count)}
    assert examine(store) == {}
    assert store.dead.ids("q") == [*left]
    assert [each.reason for each in store.dead.letters("q", [*left])] == ["because"] * len(left)


@pytest.mark.parametrize("text", [None, "", "{", "5", '{"reason": "x"}', note("x", at_ms=5)[:-1]])
@pytest.mark.parametrize("is_listed", [True, False])
def test_a_dead_letter_without_its_note(
    text: str | None, is_listed: bool, store: Store, client: redis.Redis
) -> None:
    bury(store, *"ab")
    client.hdel(REASONS, "b")
    if text is not None:
        client.hset(REASONS, "b", text)
    if not is_listed:
        client.zrem(DEAD, "b")
    assert wrong(store) == {"dead-orphan"}
    store.now = "2000"
    assert examine(store, fix=True) == {"dead-orphan": (1, 1)}
    at_ms = 1000 if is_listed else 2000
    assert dead_state(client) == {
        DEAD: {"a": 1000, "b": at_ms},
        MESSAGES: {"a": "0a is no JSON", "b": "0b is no JSON"},
        REASONS: {"a": note("because"), "b": note(LOST, 0, "", at_ms)},
    }
    assert examine(store) == {}


# Names.


def test_duplicates_that_point_to_nothing(store: Store, client: redis.Redis) -> None:
    for body in ("first", "second"):
        store.schedule("q", [entry(id, 2000, body=body) for id in "ab"])
    assert examine(store) == {}
    client.hset("{q}:duplicates", mapping={"a": 3, "c": 2, "d": "x"})
    before = state(client)
    assert examine(store) == {"duplicate": (2, 0)}
    assert state(client) == before
    assert examine(store, fix=True) == {"duplicate": (2, 2)}
    assert client.hkeys("{q}:duplicates") == [b"a", b"b"]
    assert examine(store) == {}


def keep_unique(store: Store, *ids: str) -> None:
    for id in ids:
        store.schedule_unique("q", entry(id, 2000), f"key {id}", "refuse")


UNIQUE, UNIQUE_DUE = "{q}:unique", "{q}:unique-due"


@pytest.mark.parametrize(
    ("damage", "left"),
    [
        (lambda client: client.hdel(UNIQUE, "key b"), ["key a"]),
        (lambda client: client.hset(UNIQUE, "key z", "z"), ["key a", "key b"]),
        (lambda client: client.zadd(UNIQUE_DUE, {"key z": 5}), ["key a", "key b"]),
        (lambda client: client.zrem(UNIQUE_DUE, "key b"), ["key a", "key b"]),
    ],
)
def test_unique_keys_that_point_to_nothing(
    damage: Callable[[redis.Redis], Any], left: list[str], store: Store, client: redis.Redis
) -> None:
    keep_unique(store, *"ab")
    assert examine(store) == {}
    damage(client)
    assert wrong(store) == {"key"}
    assert examine(store, fix=True) == {"key": (1, 1)}
    assert client.zrange(UNIQUE_DUE, 0, -1, withscores=True) == [
        (name.encode(), 2000.0) for name in left
    ]
    assert sorted(client.hkeys(UNIQUE)) == [name.encode() for name in left]
    assert examine(store) == {}


def test_unique_keys_that_moves_leave(store: Store, client: redis.Redis) -> None:
    """They are cleared in passing, so nothing is wrong."""
    keep_unique(store, *"a")
    before, store.now = store.now, "2000"
    deliver(store, lease_ms=0)
    store.now = before
    keep_unique(store, *"b")
    assert wrong(store) == set()
    assert examine(store) == {"leftover": (1, 0)}
    assert examine(store, fix=True) == {"leftover": (1, 1)}
    assert client.hgetall(UNIQUE) == {b"key b": b"b"}
    assert examine(store) == {}


def test_ledgers_that_are_past(store: Store, client: redis.Redis) -> None:
    """Writing the next ledger drops them, so nothing is wrong."""
    for name, delay in (("a", 0.0), ("b", 1.0)):
        OnceStore(store, name, None, delay).schedule("q", [entry(name, 5_000)])
    store.purge("q")
    assert examine(store) == {}
    store.now = f"{1_000 + KEPT_SECONDS * 1_000}"
    assert wrong(store) == set()
    assert examine(store) == {"past": (1, 0)}
    assert examine(store, fix=True) == {"past": (1, 1)}
    assert client.keys("*:job:*") == client.zrange(LEDGERS, 0, -1) == [b"{q}:job:http:b"]
    assert examine(store) == {}


# Consumers.


class Watched:
    """A time that passes when the doctor sleeps, in which a consumer renews its lease."""

    def __init__(self, renew: Callable[[], Any], renews_at: float) -> None:
        self._at, self._renew, self._renews_at = 0.0, renew, renews_at

    def monotonic(self) -> float:
        return self._at

    def sleep(self, seconds: float) -> None:
        self._at += seconds
        if self._at >= self._renews_at:
            self._renew()


@pytest.mark.parametrize(
    ("name", "lives"),
    [("w:1:0123abcd", True), ("w:1:0123abcd-30000", True), ("http:1:" + "a" * 32, False)],
)
def test_a_living_consumer_after_the_clock_was_set_forward(
    store: Store, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, name: str, lives: bool
) -> None:
    """Also one of version 0.1.0, whose name has no length."""
    store.publish("q", [entry("a")])
    store.deliver("q", name, 1, 1, lease_ms=30_000, waits=False)
    store.now = "3600000"
    renew = lambda: client.zadd("{q}:consumers", {name: 3_630_000})  # noqa: E731
    monkeypatch.setattr(consumers, "time", Watched(renew, 10))
    examine(store, fix=True)
    assert bool(store.leases.consumers("q")) == lives


def test_key_names_are_scanned_once_for_all_queues(store: Store, client: redis.Redis) -> None:
    queues = [f"q{n}" for n in range(20)]
    for queue in queues:
        store.publish(queue, [entry("a")])
        store.deliver(queue, "A:1:0123abcd-1", 1, 1, lease_ms=30_000, waits=False)
        client.delete(f"{{{queue}}}:consumers")
    client.config_resetstat()
    found = examine_queues(store, queues, patience_seconds=0)
    assert [(each.queue, each.kind) for each in found] == [(q, "unregistered") for q in queues]
    calls: Any = client.info("commandstats")
    assert calls["cmdstat_scan"]["calls"] == 1


@pytest.mark.parametrize("lives", [True, False])
def test_a_consumer_that_comes_or_ends_after_the_scan(
    store: Store, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, lives: bool
) -> None:
    store.publish("q", [entry("a")])
    lease(store, want=1)
    (lease_end,) = client.zrange("{q}:consumers", 0, -1, withscores=True)
    client.delete("{q}:consumers")

    def change(examined: Messages) -> None:
        if lives:
            client.zadd("{q}:consumers", dict([lease_end]))
        else:
            store.leases.reclaim("q", "w1")

    monkeypatch.setattr(Messages, "examine", change)
    assert examine(store) == {}


# Tokens.


def lease(store: Store, name: str = "w1", want: int = 0) -> None:
    store.deliver("q", name, want, 1, lease_ms=5000, waits=False)


def test_a_token_that_nobody_takes(store: Store) -> None:
    store.schedule("q", [entry("a", 2000)])
    assert examine(store) == {}  # nobody lives
    lease(store)
    assert wrong(store) == {"untaken"}
    (finding,) = examine_queues(store, ["q"], fix=True, patience_seconds=0)
    assert (finding.kind, finding.fixed, finding.examples) == ("untaken", 0, ["w1"])
    store.now = "7000"  # its lease has ended
    assert wrong(store) == {"lease"}


def test_ready_messages_with_a_step_of_others(store: Store, client: redis.Redis) -> None:
    for step in (3, 4, 9, 12):
        client.lpush(f"q\x06\x16{step}", "{}")
    found = examine_queues(store, ["q"], fix=True, patience_seconds=0)
    (finding,) = [each for each in found if each.kind == "step"]
    assert (finding.fixed, finding.is_wrong, finding.examples) == (0, True, ["step 4: 1 ready"])


def test_whose_hands_are_full_need_not_take_tokens(store: Store) -> None:
    store.publish("q", [entry("a"), entry("b")])
    lease(store, want=1)
    assert examine(store) == {}
    store.now = "7000"  # its lease has ended
    assert "untaken" not in examine(store)


def test_whose_hands_are_full_of_another_queue_need_not_take_tokens(
    connect: Connect, store: Store
) -> None:
    store.now = ""
    inbox = Inbox(connect(), Queue("p"), Queue("q"), prefetch_count=1, ack=False)
    for queue in ("q", "p"):
        store.publish(queue, [entry(queue)])
        inbox.receive(1)
        if queue == "q":
            inbox.messages.pop().ack()
    store.publish("q", [entry("b")])
    assert wrong(store) == set()
    inbox.messages.pop().ack()
    assert len(inbox.receive(1)) == 1


def test_a_consumer_that_waits(connect: Connect, store: Store) -> None:
    """It takes each token at once, no matter what arrives."""
    store.now = ""
    connection = connect()
    queue = Queue("q", routing_key="q")
    due_ms = int(time.time() * 1000) + 3_600_000
    with Consumer(connection, [queue], accept=["json"]):
        for id in "ab":
            store.schedule("q", [entry(id, due_ms)])
            with pytest.raises(TimeoutError):
                connection.drain_events(timeout=0.3)
            assert [each for each in examine_queues(store, ["q"]) if each.is_wrong] == []


# Records that stop their readers.


@pytest.mark.parametrize(
    ("name", "shown", "quoted"), [("q", "q", "q"), (shard_name("my q", 1), "my q", "'my q'")]
)
def test_a_record_that_cannot_be_read_is_named_and_its_remedy_helps(
    name: str, shown: str, quoted: str, store: Store, client: redis.Redis
) -> None:
    store.schedule(name, [entry("a", 5000), entry("b", 5000)])
    client.hset(store.keys(name).messages, "a", "junk")
    backlog = Backlog(store, name)
    said = (
        f"message 'a' in queue '{shown}' cannot be read.*: celery delayed doctor --fix -Q {quoted}$"
    )
    for read in (backlog.page, partial(backlog.get, "a")):
        with pytest.raises(MessageError, match=said):
            read()
    examine_queues(store, [name], fix=True, patience_seconds=0)
    assert [each.id for each in backlog.page().waiting] == ["b"]
    assert store.dead.ids(name) == ["a"]
