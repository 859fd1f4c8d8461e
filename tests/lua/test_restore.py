"""Restores put each message of a backup back once, even if it was used meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from kombu_delayed.inspection.events import read
from kombu_delayed.inspection.restore_placement import by_shard
from kombu_delayed.store.store import Entry, Limits, Store
from tests.kit.backlog import check_backlog
from tests.kit.backlog import records as records_of
from tests.kit.restoring import kept, restore, restore_dead
from tests.kit.state import entry, message, note, state

A, B, C = (message(body) for body in "abc")


def with_eta(eta: str) -> str:
    return message("a", headers={"eta": eta})


def tagged(tag: str) -> str:
    return message("a", properties={"delivery_tag": tag})


def keyed(body: str, **headers: Any) -> str:
    return message(body, headers={"delayed_unique": "k", **headers})


@pytest.fixture(autouse=True)
def _small_partitions(store: Store) -> None:
    store.partition_size = 4


OTHERS = [entry("a", 2000, body="x"), entry("a", 2000, body="y")]
MOVED = Entry("a", 0, with_eta("2100-01-01"), "9000")


@pytest.mark.parametrize(
    ("why", "before", "records", "added"),
    [
        ("gone", [], {"a": kept(A, 2000, 3), "b": kept(B, 3000)}, ["a", "b"]),
        ("there", [entry("a", 2000)], {"a": kept(A, 2000), "b": kept(B, 3000)}, ["b"]),
        ("moved", [entry("a", 9000)], {"a": kept(A, 2000)}, []),
        ("moved, and its eta", [MOVED], {"a": kept(with_eta("1970-01-01"), 2000)}, []),
        ("sent again", [Entry("a", 0, tagged("new"), "2000")], {"a": kept(tagged("x"), 1)}, []),
        ("another has its id", [entry("a", 2000, body="x")], {"a": kept(A, 3000)}, ["a\x1f2"]),
        ("another priority", [entry("a", 2000, step=3)], {"a": kept(A, 2000, 6)}, ["a\x1f2"]),
        ("several", [], {"a\x1f2": kept(B, 2000), "a": kept(A, 3000)}, ["a\x1f2", "a"]),
        (
            "others share their id",
            OTHERS,
            {"a\x1f2": kept(B, 3000), "a": kept(A, 3000)},
            ["a\x1f3", "a\x1f4"],
        ),
        ("due by now", [], {"a": kept(A, 500)}, ["a"]),
    ],
)
def test_restore(
    why: str,
    before: list[Entry],
    records: dict[str, str],
    added: list[str],
    store: Store,
    client: redis.Redis,
) -> None:
    """Restored messages get the names in `added`; existing messages stay as they are."""
    store.schedule("q", before)
    after = records_of(client)
    new = [*records.values()][len(records) - len(added) :]
    after |= dict(zip(added, new, strict=True))
    for count in (len(added), 0):
        assert restore(store, [*records.items()]) == (count, len(records) - count)
        check_restored(client, after)


def check_restored(client: redis.Redis, after: dict[str, str]) -> None:
    assert records_of(client) == after
    members = check_backlog(client)
    numbers: dict[str, int] = {}
    for member in members:
        id, _, n = member.partition("\x1f")
        if n:
            numbers[id] = max(numbers.get(id, 0), int(n))
    assert {k.decode(): int(n) for k, n in client.hgetall("{q}:duplicates").items()} == numbers
    assert client.zrange("{q}:wake", 0, -1, withscores=True) == [(b"due", min(members.values()))]


@pytest.mark.parametrize(
    ("headers", "holds"),
    [
        ({}, True),
        ({"retries": None}, True),
        ({"retries": 1}, False),
        ({"delayed_unique": None}, False),
    ],
)
def test_a_restored_message_holds_its_key(
    headers: dict[str, Any], holds: bool, store: Store, client: redis.Redis
) -> None:
    restore(store, [("a", kept(keyed("a", **headers), 2000))])
    after = state(client)
    assert after.get("{q}:unique") == ({"k": "a"} if holds else None)
    assert after.get("{q}:unique-due") == ({"k": 2000} if holds else None)
    answer = store.schedule_unique("q", entry("b", 3000), "k", "refuse")
    assert answer == (("refused", "a") if holds else ("stored", ""))


def test_what_is_restored_is_told_once(store: Store, client: redis.Redis) -> None:
    store.event_limit = 100
    text = message("a", headers={"id": "a", "task": "mail.send"})
    records = [("a\x1f2", kept(text, 2000)), ("b", kept(B, 500))]
    for _ in range(2):
        restore(store, records)
    told = [(each.event, each.id, each.task, each.due_ms) for each in read(store, "q")]
    assert told == [("scheduled", "a", "mail.send", 2000), ("scheduled", "b", "", 500)]
    client.delete("{q}:events")
    store.event_limit = 0
    restore(store, [("c", kept(C, 2000))])
    assert client.exists("{q}:events") == 0


@pytest.mark.parametrize("times", [1, 2])
def test_restored_dead_letters_last_until_a_burial(
    times: int, store: Store, client: redis.Redis
) -> None:
    """Even letters past their age stay: the operator who restores them looks for them."""
    store.limits, store.now = Limits(dead_seconds=60), "100000"
    for restored in (1, 0)[:times]:
        row = ("a", 700, "0" + A, note("r", at_ms=700))
        assert restore_dead(store, [row]) == (restored, 1 - restored)
    keys = ("{q}:dead", "{q}:dead-messages", "{q}:dead-reasons")
    assert all(client.exists(key) for key in keys)
    assert [client.pttl(key) for key in keys] == [-1] * 3
    store.bury("q", "A", [(1, "b", "rejected", b"0{}")])
    assert store.dead.ids("q") == ["b"]


@pytest.mark.parametrize(
    "text",
    [
        keyed("a", delayed_conflict="of another program"),
        '{"headers": 1, "delayed_unique": "k"}',
        '{"headers": {"delayed_unique": "k"',
        '"delayed_unique": "k"',
    ],
)
def test_an_odd_message_goes_to_the_shard_of_its_id(text: str, client: redis.Redis) -> None:
    store = Store(client, shards=3)
    item = b"a", b"05000" + text.encode()
    assert [*by_shard(store, "q", [item])] == [(store.shards.home("q", "a"), [item], [])]
