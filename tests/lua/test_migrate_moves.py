"""Messages between the stock transport's keys and the backlog: only from where they still are."""

from __future__ import annotations

import json
from typing import Any

import pytest
import redis

from kombu_delayed.store.store import Store
from tests.kit.backlog import check_backlog
from tests.kit.state import entry, message, promoted, seed, state

A, B, C, D = (message(body) for body in "abcd")
#: (tag or member, id, due_ms, record), as migrate.lua takes them.
Row = tuple[str, str, int, str]


@pytest.fixture(autouse=True)
def _time_stands_still(store: Store) -> None:
    store.now = "1000"
    store.partition_size = 4


def migrate(store: Store, source: str, rows: list[Row], **more: int) -> list[int]:
    """Returns how many are delayed now, and how many ready."""
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


# From the stock transport's unacked.


def stock(**since: int) -> dict[str, Any]:
    """What stock workers hold: tag -> when it was delivered, in seconds."""
    unacked = {tag: json.dumps([json.loads(message(tag)), "", "q"]) for tag in since}
    return {"unacked": unacked, "unacked_index": since}


@pytest.mark.parametrize(
    ("before", "rows", "keep", "counts", "after"),
    [
        pytest.param(
            stock(a=5),
            [("a", "a", 2000, "0" + A)],
            0,
            [1, 0],
            {"{q}:messages": {"a": "0" + A}, "{q}:wake": {"due": 2000}},
            id="not yet due",
        ),
        pytest.param(
            stock(a=5, b=5),
            [("a", "a", 1000, "0" + A), ("b", "b", 0, "3" + B)],
            0,
            [0, 2],
            {"q": [A], "q\x06\x163": [B], "{q}:wake": {"now": 0}},
            id="due",
        ),
        pytest.param(
            {**stock(a=5, b=5), "q": [C]},
            [("b", "b", 0, "0" + B), ("a", "a", 0, "0" + A)],
            0,
            [0, 2],
            {"q": [A, B, C], "{q}:wake": {"now": 0}},
            id="to the head, in order",
        ),
        pytest.param(
            stock(a=10),
            [("a", "a", 2000, "0" + A)],
            0,
            [1, 0],
            {"{q}:messages": {"a": "0" + A}, "{q}:wake": {"due": 2000}},
            id="just old enough",
        ),
        pytest.param(
            stock(a=11), [("a", "a", 2000, "0" + A)], 0, [0, 0], stock(a=11), id="delivered anew"
        ),
        pytest.param({}, [("a", "a", 2000, "0" + A)], 0, [0, 0], {}, id="acked meanwhile"),
        pytest.param(
            stock(b=5),
            [("a", "a", 0, "0" + A), ("b", "b", 0, "0" + B)],
            0,
            [0, 1],
            {"q": [B], "{q}:wake": {"now": 0}},
            id="one of two acked meanwhile",
        ),
        pytest.param(
            stock(a=5),
            [("a", "a", 2000, "0" + A)],
            1,
            [1, 0],
            {**stock(a=5), "{q}:messages": {"a": "0" + A}, "{q}:wake": {"due": 2000}},
            id="kept for another queue, not yet due",
        ),
        pytest.param(
            stock(a=5),
            [("a", "a", 0, "0" + A)],
            1,
            [0, 1],
            {**stock(a=5), "q": [A], "{q}:wake": {"now": 0}},
            id="kept for another queue, due",
        ),
        pytest.param(
            {"unacked": stock(a=5)["unacked"]},
            [("a", "a", 2000, "0" + A)],
            0,
            [1, 0],
            {"{q}:messages": {"a": "0" + A}, "{q}:wake": {"due": 2000}},
            id="in no index",
        ),
    ],
)
def test_from_unacked(
    before: dict[str, Any],
    rows: list[Row],
    keep: int,
    counts: list[int],
    after: dict[str, Any],
    store: Store,
    client: redis.Redis,
) -> None:
    seed(client, before)
    assert migrate(store, "unacked", rows, keep=keep) == counts
    assert without_partitions(client) == after
    if not keep:
        assert migrate(store, "unacked", rows) == [0, 0]
        assert without_partitions(client) == after


def without_partitions(client: redis.Redis) -> dict[str, Any]:
    """The database; the partitions are checked, and due times are those of the messages."""
    check_backlog(client)
    parts = ("{q}:partitions", "{q}:delayed:")
    return {key: value for key, value in state(client).items() if not key.startswith(parts)}


def test_what_is_kept_and_taken_again_is_delayed_once(store: Store, client: redis.Redis) -> None:
    seed(client, stock(a=5))
    rows = [("a", "a", 2000, "0" + A)]
    for keep in (1, 1, 0):
        assert migrate(store, "unacked", rows, keep=keep) == [1, 0]
    assert check_backlog(client) == {"a": 2000}
    assert client.exists("unacked", "unacked_index") == 0


def test_two_stock_messages_with_one_id(store: Store, client: redis.Redis) -> None:
    seed(client, stock(a=5, b=5))
    rows = [("a", "id", 2000, "0" + A), ("b", "id", 2000, "0" + B)]
    assert migrate(store, "unacked", rows) == [2, 0]
    assert check_backlog(client) == {"id": 2000, "id\x1f2": 2000}
    assert state(client)["{q}:duplicates"] == {"id": "2"}


# From a ready list. In `state` a list begins with what is delivered first, its right end; `start`
# and `stop` count from the left.


@pytest.mark.parametrize(
    ("before", "rows", "part", "left", "delayed"),
    [
        pytest.param([A, B], [A], {}, [B], [A], id="one"),
        pytest.param([A, B, C], [A, C], {}, [B], [A, C], id="several"),
        pytest.param([A], [A], {}, None, [A], id="the last one"),
        pytest.param([B], [A, B], {}, None, [B], id="one was delivered meanwhile"),
        pytest.param([], [A], {}, None, [], id="all were delivered meanwhile"),
        pytest.param([C], [A], {}, [C], [], id="another is in its place"),
        pytest.param([A, B, C], [A], {"stop": 1}, [A, B, C], [], id="beyond the part"),
        pytest.param([A, B, C], [C], {"start": 1}, [A, B, C], [], id="in front of the part"),
        pytest.param([A, B, C, D], [A, B], {"start": 2}, [C, D], [A, B], id="near the right end"),
        pytest.param([A, B, C, D], [C, D], {"stop": 1}, [A, B], [C, D], id="near the left end"),
    ],
)
def test_from_ready(
    before: list[str],
    rows: list[str],
    part: dict[str, int],
    left: list[str] | None,
    delayed: list[str],
    store: Store,
    client: redis.Redis,
) -> None:
    seed(client, {"q": before})
    given = [("", json.loads(text)["body"], 2000, "0" + text) for text in rows]
    assert migrate(store, "ready", given, **part) == [len(delayed), 0]
    assert state(client).get("q") == left
    assert check_backlog(client) == {json.loads(text)["body"]: 2000 for text in delayed}
    tokens = {"due": 2000} if delayed else None
    assert state(client).get("{q}:wake") == tokens
    assert migrate(store, "ready", given, **part) == [0, 0]
    assert state(client).get("q") == left


def test_what_has_fallen_due_stays_ready(store: Store, client: redis.Redis) -> None:
    seed(client, {"q": [A, B]})
    rows = [("", "a", 1000, "0" + A), ("", "b", 1001, "0" + B)]
    assert migrate(store, "ready", rows) == [1, 0]
    assert state(client)["q"] == [A]
    assert check_backlog(client) == {"b": 1001}


def test_from_the_list_of_its_priority(store: Store, client: redis.Redis) -> None:
    seed(client, {"q": [A], "q\x06\x166": [A]})
    assert migrate(store, "ready", [("", "a", 2000, "6" + A)]) == [1, 0]
    assert state(client)["q"] == [A]
    assert "q\x06\x166" not in state(client)
    assert state(client)["{q}:messages"] == {"a": "6" + A}


@pytest.mark.parametrize("offset", [0, 1, 40, 79])
def test_what_moved_on_in_its_list_is_found(offset: int, store: Store, client: redis.Redis) -> None:
    """Producers push from the left, so that the place that was read is another one by now."""
    texts = [message(f"m{n}") for n in range(80)]
    seed(client, {"q": texts})
    client.lpush("q", *(message(f"new{n}") for n in range(30)))
    given = [("", f"m{offset}", 2000, "0" + texts[offset])]
    assert migrate(store, "ready", given) == [1, 0]
    left = [json.loads(text)["body"] for text in state(client)["q"]]
    assert left == [
        *(f"m{n}" for n in range(80) if n != offset),
        *(f"new{n}" for n in range(30)),
    ]


# From the backlog.


@pytest.mark.parametrize(
    ("rows", "ready", "left", "tokens"),
    [
        (["a"], {"q": [A]}, {"b": 3000, "c": 900}, {"due": 900, "now": 0}),
        (["a", "b"], {"q": [A], "q\x06\x163": [B]}, {"c": 900}, {"due": 900, "now": 0}),
        (["c"], {"q": [promoted(C, 900)]}, {"a": 2000, "b": 3000}, {"due": 900, "now": 0}),
        (["c", "a", "b"], {"q": [promoted(C, 900), A], "q\x06\x163": [B]}, {}, {"now": 0}),
        (["x"], {}, {"a": 2000, "b": 3000, "c": 900}, {"due": 900}),
        ([], {}, {"a": 2000, "b": 3000, "c": 900}, {"due": 900}),
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
    assert migrate(store, "delayed", given) == [0, sum(map(len, ready.values()))]
    assert check_backlog(client) == left
    after = without_partitions(client)
    assert {key: value for key, value in after.items() if key[0] == "q"} == ready
    assert after["{q}:wake"] == tokens
    assert migrate(store, "delayed", given) == [0, 0]
    assert without_partitions(client) == after


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


def test_from_a_backlog_of_many_partitions(store: Store, client: redis.Redis) -> None:
    due = {f"{n}": 2000 + n for n in range(40)}
    store.schedule("q", [entry(id, at_ms) for id, at_ms in due.items()])
    for id, at_ms in due.items():
        assert migrate(store, "delayed", [(id, "", at_ms, "")]) == [0, 1]
        check_backlog(client)
    assert set(state(client)) == {"q", "{q}:wake"}
    assert state(client)["{q}:wake"] == {"now": 0}


def test_what_becomes_ready_expires_with_its_queue(store: Store, client: redis.Redis) -> None:
    seed(client, stock(a=5))
    client.set("{q}:expires", 60_000)
    assert migrate(store, "unacked", [("a", "a", 500, "0" + A)]) == [0, 1]
    assert 0 < client.pttl("q") <= 60_000
