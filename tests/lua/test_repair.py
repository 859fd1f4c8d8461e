"""The doctor finds and repairs faults in a backlog that contradicts itself."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from typing import Any

import pytest
import redis

from kombu_delayed.errors import ServerError
from kombu_delayed.inspection.doctor import (
    examination,
    examine_queues,
    examine_server,
    messages,
    server,
)
from kombu_delayed.store.store import Store
from kombu_delayed.transport.server_checks import Server, check, inspect
from tests.kit.backlog import check_backlog, due_times
from tests.kit.claims import deliver
from tests.kit.state import entry, message, returned, state

Damage = Any  # a function that is given a client


@pytest.fixture(autouse=True)
def _small_partitions(store: Store) -> None:
    store.partition_size = 4


def examine(store: Store, fix: bool = False) -> dict[str, tuple[int, int]]:
    """Return kind of fault -> how many there are, and how many were repaired."""
    found = examine_queues(store, ["q"], fix=fix, patience_seconds=0)
    assert all(each.queue == "q" and each.examples and each.meaning for each in found)
    return {each.kind: (each.count, each.fixed) for each in found}


def fill(store: Store, count: int = 10) -> dict[str, int]:
    due = {f"m{n}": 2000 + 10 * n for n in range(count)}
    store.schedule("q", [entry(id, at_ms) for id, at_ms in due.items()])
    return due


def partition_of(client: redis.Redis, member: str) -> str:
    keys = [key.decode() for key in client.keys("{q}:delayed:*")]
    (name,) = [key for key in keys if client.zscore(key, member) is not None]
    return name


def test_nothing_is_wrong(store: Store, client: redis.Redis) -> None:
    assert examine(store) == {}
    fill(store)
    before = state(client)
    assert examine(store) == examine(store, fix=True) == {}
    assert state(client) == before


# The backlog. m3 is due at 2030.


def other_time_in_message(client: redis.Redis) -> None:
    record = client.hget("{q}:messages", "m3").decode()
    client.hset("{q}:messages", "m3", record.replace("2030", "2077", 1))


def other_partition(client: redis.Redis) -> None:
    client.zrem(partition_of(client, "m3"), "m3")
    client.zadd(partition_of(client, "m9"), {"m3": 2030})


def move_bound(client: redis.Redis, at: int, to_ms: int) -> None:
    client.zadd("{q}:partitions", {client.zrange("{q}:partitions", at, at)[0]: to_ms})


DAMAGES: dict[str, tuple[Damage, dict[str, int]]] = {
    "entry is gone": (lambda c: c.zrem(partition_of(c, "m3"), "m3"), {"orphan": 1}),
    "later": (lambda c: c.zadd(partition_of(c, "m3"), {"m3": 2031}), {"time": 1}),
    "far away": (lambda c: c.zadd(partition_of(c, "m3"), {"m3": 9000}), {"time": 1}),
    "other time in message": (other_time_in_message, {"time": 1}),
    "other partition": (other_partition, {"misplaced": 1}),
    "second entry": (lambda c: c.zadd(partition_of(c, "m9"), {"m3": 2030}), {"misplaced": 1}),
    "first bound too high": (lambda c: move_bound(c, 0, 2005), {"misplaced": 1}),
    "empty first": (lambda c: c.zadd("{q}:partitions", {"5": 5}), {"empty": 1}),
    "empty last": (lambda c: c.zadd("{q}:partitions", {"9999": 9999}), {"empty": 1}),
    "no index": (lambda c: c.delete("{q}:partitions"), {"misplaced": 10}),
    "nothing but messages": (
        lambda c: c.delete("{q}:partitions", *c.keys("{q}:delayed:*")),
        {"orphan": 10},
    ),
}


@pytest.mark.parametrize("page", [1, 200])
@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_backlog(
    name: str, page: int, store: Store, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "PAGE_SIZE", page)
    monkeypatch.setattr(messages, "CALL_LIMIT", page)
    due = fill(store)
    damage, found = DAMAGES[name]
    damage(client)
    before = client.dump("{q}:messages")
    assert examine(store) == {kind: (count, 0) for kind, count in found.items()}
    assert client.dump("{q}:messages") == before
    examine(store, fix=True)
    assert examine(store) == {}
    assert check_backlog(client) == (due | {"m3": 2077} if name == "other time in message" else due)


def test_bounds_that_overlap(store: Store, client: redis.Redis) -> None:
    due = fill(store)
    move_bound(client, 1, 2035)
    assert examine(store).keys() <= {"misplaced", "orphan"}
    assert examine(store) != {}
    examine(store, fix=True)
    assert examine(store) == {}
    assert check_backlog(client) == due


def test_message_that_is_gone(store: Store, client: redis.Redis) -> None:
    due = fill(store, 2)
    for id in ("m1", "m0"):
        client.hdel("{q}:messages", id)
        assert examine(store) == {"lost": (1, 0)}
        assert examine(store, fix=True) == {"lost": (1, 1)}
        del due[id]
        assert check_backlog(client) == due
    assert set(state(client)) == {"{q}:wake"}


@pytest.mark.parametrize("indexed", [True, False])
def test_record_that_cannot_be_read(indexed: bool, store: Store, client: redis.Redis) -> None:
    due = fill(store, 3)
    if not indexed:
        client.zrem(partition_of(client, "m1"), "m1")
    client.hset("{q}:messages", "m1", "what?")
    assert examine(store) == {"unreadable": (1, 0)}
    assert examine(store, fix=True) == {"unreadable": (1, 1)}
    assert check_backlog(client) == {id: at_ms for id, at_ms in due.items() if id != "m1"}
    (letter,) = store.dead.letters("q", store.dead.ids("q"))
    assert (letter.id, letter.message) == ("m1", b"what?")
    assert letter.reason == "its record in the backlog cannot be read"


def test_everything_at_once(
    store: Store, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "PAGE_SIZE", 20)
    chance = random.Random(1)
    due = {f"m{n}": 2000 + chance.randrange(300) for n in range(200)}
    store.schedule("q", [entry(id, at_ms) for id, at_ms in due.items()])
    for _ in range(100):
        key, other = (chance.choice(sorted(client.keys("{q}:delayed:*"))) for _ in range(2))
        member = client.zrange(key, 0, 0)[0]
        what = chance.randrange(3)
        if what == 0:
            client.zrem(key, member)
        elif what == 1:
            client.zadd(key, {member: 2000 + chance.randrange(300)})
        else:
            client.zadd(other, {member: 2000 + chance.randrange(300)})
    assert sum(count for count, _ in examine(store).values()) > 50
    examine(store, fix=True)
    assert examine(store) == {}
    assert check_backlog(client) == due
    assert max(map(len, due_times(client))) <= 8


def test_binary_names(store: Store, client: redis.Redis) -> None:
    client.hset("{q}:messages", b"\xff\x00", "02000" + message("a"))
    (finding,) = [each for each in examine_queues(store, ["q"], fix=True) if each.kind == "orphan"]
    assert finding.examples == ["\\xff\x00"]
    assert client.zrange("{q}:delayed:2000", 0, -1) == [b"\xff\x00"]


@pytest.mark.parametrize("kind", ["lease", "unregistered"])
def test_messages_of_a_consumer_without_a_lease(
    kind: str, store: Store, client: redis.Redis
) -> None:
    store.publish("q", [entry("a")])
    deliver(store, "A:1:0123abcd-1", lease_ms=1000)
    assert examine(store) == {}
    if kind == "lease":
        store.now = "2000"
    else:
        client.delete("{q}:consumers")
    assert examine(store) == {kind: (1, 0)}
    assert examine(store, fix=True) == {kind: (1, 1)}
    assert state(client) == {"q": [returned(message("a"), 1)], "{q}:wake": {"now": 0}}


def test_a_server_that_did_not_grant_the_leases(store: Store, client: redis.Redis) -> None:
    store.now = ""
    store.publish("q", [entry("a")])
    deliver(store, lease_ms=1000)
    client.zadd("{q}:consumers", {"A": 1})
    client.set("{q}:granted-by", "another")
    assert examine(store) == {}
    client.set("{q}:granted-by", client.info("server")["run_id"])  # type: ignore[index]
    assert set(examine(store)) == {"lease"}
    client.delete("{q}:granted-by")
    assert set(examine(store)) == {"lease"}


@pytest.mark.parametrize(
    ("ready", "example"),
    [(True, "1 ready, 1 delayed"), (False, "1 delayed")],
)
def test_lost_tokens(ready: bool, example: str, store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("a", 2000)])
    if ready:
        store.publish("q", [entry("b")])
    tokens = state(client)["{q}:wake"]
    client.delete("{q}:wake")
    (finding,) = examine_queues(store, ["q"])
    assert (finding.kind, finding.examples) == ("silent", [example])
    assert examine(store, fix=True) == {"silent": (1, 1)}
    assert state(client)["{q}:wake"] == tokens
    assert examine(store) == {}


def test_a_promise_counts_while_its_consumer_lives(store: Store) -> None:
    store.schedule("q", [entry("a", 9000)])
    deliver(store, "A:1:0123abcd-1", lease_ms=1000)
    store.run("DEL", "{q}:wake")
    assert examine(store) == {}
    store.now = "3000"
    assert examine(store) == {"lease": (1, 0), "silent": (1, 0)}
    assert examine(store, fix=True) == {"lease": (1, 1)}  # to reclaim is to announce
    assert examine(store) == {}


def test_a_token_that_a_consumer_has_taken_for_later(store: Store) -> None:
    """After a pause, or if another consumer has ended, it is not told by its last claim."""
    store.schedule("q", [entry("a", 9000)])
    deliver(store, lease_ms=60_000)
    store.pauses.pause("q", "ada", "")
    store.pauses.resume("q")
    assert store.run("ZPOPMIN", "{q}:wake")[0] == b"due"
    assert examine(store) == {}
    store.now = "9000"
    assert examine(store) == {"silent": (1, 0)}


@pytest.mark.parametrize("level", [logging.WARNING, logging.ERROR])
@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({}, []),
        ({"persistent": False}, ["keeps nothing on disk"]),
        ({"eviction": "volatile-lru", "ahead_seconds": -9.0}, ["volatile-lru", "9 seconds behind"]),
    ],
)
def test_server(
    changes: dict[str, Any],
    texts: list[str],
    level: int,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither the log level nor the logs of other connections make a difference."""
    caplog.set_level(level, "kombu_delayed")
    known = replace(inspect(store.client), persistent=True)

    def beside_another_one(client: redis.Redis) -> Server:
        check(replace(known, stops_with_others=True))
        return replace(known, **changes)

    monkeypatch.setattr(server, "inspect", beside_another_one)
    finding = examine_server(store)
    found = sorted(finding.examples) if finding else []
    assert len(found) == len(texts)
    for text in texts:
        assert any(text in each for each in found)
    monkeypatch.setattr(server, "inspect", lambda client: replace(known, version="5.0"))
    with pytest.raises(ServerError, match=r"Redis 5\.0"):
        examine_server(store)
