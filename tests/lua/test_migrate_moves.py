"""Moves between the stock transport's keys and the backlog, only of messages still there."""

from __future__ import annotations

import json
from typing import Any

import pytest
import redis

from kombu_delayed.store.store import Store
from tests.kit.backlog import check_backlog
from tests.kit.state import entry, message, promoted, seed, state

A, B, C = (message(body) for body in "abc")
#: (tag or member, id, due_ms, record), as migrate.lua takes them.
Row = tuple[str, str, int, str]


@pytest.fixture(autouse=True)
def _small_partitions(store: Store) -> None:
    store.partition_size = 4


def row(id: str, due_ms: int = 2000, step: int = 0, *, tag: str | None = None) -> Row:
    return (id if tag is None else tag), id, due_ms, f"{step}{message(id)}"


def migrate(store: Store, source: str, rows: list[Row], **more: int) -> list[int]:
    """Return how many messages are delayed now, and how many ready."""
    counts: list[int] = store.ask(
        "migrate",
        "q",
        stock_unacked="unacked",
        stock_index="unacked_index",
        source=source,
        entries=[part for row in rows for part in row],
        **{"until_seconds": 10, "keep": 0, "start": 0, "stop": -1, **more},
    )
    return counts


def stock(**since: int) -> dict[str, Any]:
    """The messages that stock workers hold; `since` is tag -> delivery time in seconds."""
    unacked = {tag: json.dumps([json.loads(message(tag)), "", "q"]) for tag in since}
    return {"unacked": unacked, "unacked_index": since}


MID = "q\x06\x163"
A_IS_DELAYED = {"{q}:messages": {"a": "0" + A}, "{q}:wake": {"due": 2000}}


@pytest.mark.parametrize(
    ("why", "before", "rows", "counts", "after"),
    [
        ("not yet due", stock(a=5), [row("a")], [1, 0], A_IS_DELAYED),
        ("just old enough", stock(a=10), [row("a")], [1, 0], A_IS_DELAYED),
        ("in no index", {"unacked": stock(a=5)["unacked"]}, [row("a")], [1, 0], A_IS_DELAYED),
        ("due", stock(a=5, b=5), [row("a", 1000), row("b", 0, 3)], [0, 2], {"q": [A], MID: [B]}),
        ("in order", stock(a=5, b=5), [row("b", 0), row("a", 0)], [0, 2], {"q": [A, B]}),
        ("delivered anew", stock(a=11), [row("a")], [0, 0], stock(a=11)),
        ("acked meanwhile", {}, [row("a")], [0, 0], {}),
        ("one acked meanwhile", stock(b=5), [row("a", 0), row("b", 0)], [0, 1], {"q": [B]}),
    ],
)
def test_from_unacked(
    why: str,
    before: dict[str, Any],
    rows: list[Row],
    counts: list[int],
    after: dict[str, Any],
    store: Store,
    client: redis.Redis,
) -> None:
    """Due messages go to the head of their list."""
    seed(client, before)
    if counts[1]:
        seed(client, {"q": [C]})
        after = {**after, "q": [*after["q"], C], "{q}:wake": {"now": 0}}
    for expected in (counts, [0, 0]):
        assert migrate(store, "unacked", rows) == expected
        assert without_partitions(client) == after


def without_partitions(client: redis.Redis) -> dict[str, Any]:
    """Return the database without partitions, after a check of these and of the due times."""
    check_backlog(client)
    parts = ("{q}:partitions", "{q}:delayed:")
    return {key: value for key, value in state(client).items() if not key.startswith(parts)}


def test_what_is_kept_for_another_queue(store: Store, client: redis.Redis) -> None:
    """If it is taken again, it is delayed only once."""
    seed(client, stock(a=5, b=5))
    for keep in (1, 1, 0):
        assert migrate(store, "unacked", [row("a")], keep=keep) == [1, 0]
    assert migrate(store, "unacked", [row("b", 0)], keep=1) == [0, 1]
    tokens = {"{q}:wake": {"due": 2000, "now": 0}}
    assert without_partitions(client) == {**stock(b=5), **A_IS_DELAYED, **tokens, "q": [B]}


def test_two_stock_messages_with_one_id(store: Store, client: redis.Redis) -> None:
    seed(client, stock(a=5, b=5))
    rows = [("a", "id", 2000, "0" + A), ("b", "id", 2000, "0" + B)]
    assert migrate(store, "unacked", rows) == [2, 0]
    assert check_backlog(client) == {"id": 2000, "id\x1f2": 2000}
    assert state(client)["{q}:duplicates"] == {"id": "2"}


# From a ready list. In `state` a list begins with its right end, which is delivered first; `start`
# and `stop` count from the left.


@pytest.mark.parametrize(
    ("why", "before", "rows", "part", "left", "delayed"),
    [
        ("several", "abc", "ac", {}, "b", "ac"),
        ("the last one", "a", "a", {}, "", "a"),
        ("one was delivered meanwhile", "b", "ab", {}, "", "b"),
        ("all were delivered meanwhile", "", "a", {}, "", ""),
        ("another is in its place", "c", "a", {}, "c", ""),
        ("beyond the part", "abc", "a", {"stop": 1}, "abc", ""),
        ("in front of the part", "abc", "c", {"start": 1}, "abc", ""),
        ("near the right end", "abcd", "ab", {"start": 2}, "cd", "ab"),
        ("near the left end", "abcd", "cd", {"stop": 1}, "ab", "cd"),
    ],
)
def test_from_ready(
    why: str,
    before: str,
    rows: str,
    part: dict[str, int],
    left: str,
    delayed: str,
    store: Store,
    client: redis.Redis,
) -> None:
    seed(client, {"q": [message(id) for id in before]})
    for count in (len(delayed), 0):
        assert migrate(store, "ready", [row(id, tag="") for id in rows], **part) == [count, 0]
        assert state(client).get("q", []) == [message(id) for id in left]
    assert check_backlog(client) == dict.fromkeys(delayed, 2000)
    assert state(client).get("{q}:wake") == ({"due": 2000} if delayed else None)


def test_what_has_fallen_due_stays_ready(store: Store, client: redis.Redis) -> None:
    seed(client, {"q": [A, B]})
    assert migrate(store, "ready", [row("a", 1000, tag=""), row("b", 1001, tag="")]) == [1, 0]
    assert state(client)["q"] == [A]
    assert check_backlog(client) == {"b": 1001}


def test_from_the_list_of_its_priority(store: Store, client: redis.Redis) -> None:
    seed(client, {"q": [A], "q\x06\x166": [A]})
    assert migrate(store, "ready", [row("a", step=6, tag="")]) == [1, 0]
    assert state(client)["q"] == [A]
    assert "q\x06\x166" not in state(client)
    assert state(client)["{q}:messages"] == {"a": "6" + A}


@pytest.mark.parametrize("offset", [0, 1, 40, 79])
def test_what_moved_on_in_its_list_is_found(offset: int, store: Store, client: redis.Redis) -> None:
    """Producers push from the left, so the place that was read has shifted."""
    texts, new = ([message(f"{name}{n}") for n in range(80)] for name in ("m", "new"))
    seed(client, {"q": texts})
    client.lpush("q", *new)
    assert migrate(store, "ready", [row(f"m{offset}", tag="")]) == [1, 0]
    del texts[offset]
    assert state(client)["q"] == texts + new


@pytest.mark.parametrize(
    ("rows", "ready", "left", "tokens"),
    [
        (["a"], {"q": [A]}, {"b": 3000, "c": 900}, {"due": 900, "now": 0}),
        (["a", "b"], {"q": [A], MID: [B]}, {"c": 900}, {"due": 900, "now": 0}),
        (["c"], {"q": [promoted(C, 900)]}, {"a": 2000, "b": 3000}, {"due": 900, "now": 0}),
        (["c", "a", "b"], {"q": [promoted(C, 900), A], MID: [B]}, {}, {"now": 0}),
        (["x"], {}, {"a": 2000, "b": 3000, "c": 900}, {"due": 900}),
    ],
)
def test_from_delayed(
    rows: list[str],
    ready: dict[str, list[str]],
    left: dict[str, int],
    tokens: dict[str, int],
    store: Store,
    client: redis.Redis,
) -> None:
    """Where it has fallen due since, it says when it was."""
    due = {"a": 2000, "b": 3000, "c": 900, "x": 2000}
    store.now = "500"
    store.schedule("q", [entry("a", 2000), entry("b", 3000, step=3), entry("c", 900)])
    store.now = "1000"
    given = [(member, "", due[member], "") for member in rows]
    for count in (sum(map(len, ready.values())), 0):
        assert migrate(store, "delayed", given) == [0, count]
        assert check_backlog(client) == left
        after = without_partitions(client)
        assert {key: value for key, value in after.items() if key[0] == "q"} == ready
        assert after["{q}:wake"] == tokens


@pytest.mark.parametrize("due_ms", [1999, 2001, 9000])
def test_what_was_moved_in_the_backlog_meanwhile_stays(
    due_ms: int, store: Store, client: redis.Redis
) -> None:
    store.schedule("q", [entry("a", 2000), entry("b", 9000)])
    assert migrate(store, "delayed", [("a", "", due_ms, "")]) == [0, 0]
    assert check_backlog(client) == {"a": 2000, "b": 9000}


def test_from_delayed_what_shares_an_id(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("a", 2000 + n, body=str(n)) for n in range(3)])
    assert migrate(store, "delayed", [("a\x1f2", "", 2001, "")]) == [0, 1]
    assert state(client)["{q}:duplicates"] == {"a": "3"}
    assert migrate(store, "delayed", [("a\x1f3", "", 2002, "")]) == [0, 1]
    assert check_backlog(client) == {"a": 2000}
    assert "{q}:duplicates" not in state(client)
    assert state(client)["q"] == [message("1"), message("2")]


def test_what_becomes_ready_expires_with_its_queue(store: Store, client: redis.Redis) -> None:
    seed(client, stock(a=5))
    client.set("{q}:expires", 60_000)
    assert migrate(store, "unacked", [row("a", 500)]) == [0, 1]
    assert 0 < client.pttl("q") <= 60_000
