"""Dead letters: how messages get there, how many stay, and how they come back."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
import redis

from kombu_delayed.store.dead_letters import DeadLetter
from kombu_delayed.store.keys import SEPARATOR
from kombu_delayed.store.store import Limits, Store
from tests.kit.state import (
    dead_state,
    entry,
    message,
    note,
    promoted,
    returned,
    seed,
    state,
)

A, B, C, D = (message(body, headers={"id": body}) for body in "abcd")
MID = "q" + SEPARATOR + "3"
HELD = {"1": "0" + A, "2": "3" + B, "3": "0" + C}
NOW_TOKEN = {"{q}:wake": {"now": 0}}


@pytest.fixture(autouse=True)
def _time_stands_still(store: Store) -> None:
    store.now = "1000"


def dead_keys(letters: dict[str, str], at_ms: int = 1000) -> dict[str, Any]:
    """Return the keys of letters that were rejected by A."""
    return {
        "{q}:dead": dict.fromkeys(letters, at_ms),
        "{q}:dead-messages": letters,
        "{q}:dead-reasons": dict.fromkeys(letters, note("rejected", at_ms=at_ms)),
    }


def poisoned(deliveries: int, consumer: str = "A") -> str:
    return note(f"delivered {deliveries} times without success", deliveries, consumer)


# Poison: delivered too often.


@pytest.mark.parametrize(
    ("limit", "before", "counted", "is_buried"),
    [
        (2, 0, True, False),
        (2, 1, True, True),
        (2, 2, True, True),
        (2, 7, True, True),
        (1, None, True, True),
        (2, None, True, False),
        (20, 18, True, False),
        (20, 19, True, True),
        (0, 1_000_000, True, False),
        (1, None, False, False),
        (2, 1, False, False),
        (2, 7, False, False),
    ],
)
def test_release_at_the_limit(
    limit: int,
    before: int | None,
    counted: bool,
    is_buried: bool,
    store: Store,
    client: redis.Redis,
) -> None:
    store.limits = Limits(max_deliveries=limit)
    text = A if before is None else returned(A, before)
    seed(client, {**NOW_TOKEN, "q": [D], "{q}:unacked:A": {"7": "3" + text}})
    assert store.release("q", "A", [7], counted=counted) == 1
    count = (before or 0) + counted
    if is_buried:
        expected = {**dead_keys({"a": "3" + text}), "{q}:dead-reasons": {"a": poisoned(count)}}
    else:
        expected = {MID: [returned(A, count)]}
    assert dead_state(client) == {**NOW_TOKEN, "q": [D], **expected}


@pytest.mark.parametrize(
    ("limit", "before", "is_buried"),
    [(2, 0, False), (2, 1, True), (2, 7, True), (1, None, True), (2, None, False), (0, 99, False)],
)
def test_reclaim_at_the_limit(
    limit: int, before: int | None, is_buried: bool, store: Store, client: redis.Redis
) -> None:
    store.limits = Limits(max_deliveries=limit)
    text = A if before is None else returned(A, before)
    consumers = {"{q}:consumers": {"A": 1000, "B": 9000}}
    seed(client, {**consumers, "q": [D], "{q}:unacked:A": {"7": "3" + text}})
    assert store.leases.reclaim("q", "A") == 1
    count = (before or 0) + 1
    if is_buried:
        expected = {**dead_keys({"a": "3" + text}), "{q}:dead-reasons": {"a": poisoned(count)}}
    else:
        expected = {MID: [returned(A, count)]}
    assert dead_state(client) == {
        **NOW_TOKEN,
        "{q}:consumers": {"B": 9000},
        "q": [D],
        **expected,
    }


def test_leave_buries_nothing(store: Store, client: redis.Redis) -> None:
    store.limits = Limits(max_deliveries=1)
    seed(client, {"{q}:unacked:A": {"1": "0" + returned(A, 9)}})
    store.leases.leave("q", "A")
    assert state(client) == {**NOW_TOKEN, "q": [returned(A, 9)]}


@pytest.mark.parametrize("way", ["release", "reclaim"])
def test_some_are_poison(way: str, store: Store, client: redis.Redis) -> None:
    """The others go back in their order, and the note names who held it."""
    store.limits = Limits(max_deliveries=3)
    poison = "3" + returned(B, 2)
    seed(
        client,
        {"q": [D], "{q}:unacked:host ü:1": {**HELD, "2": poison, "4": "0" + promoted(D, 500)}},
    )
    if way == "release":
        assert store.release("q", "host ü:1", [1, 2, 3, 4, 9], counted=True) == 4
    else:
        assert store.leases.reclaim("q", "host ü:1") == 4
    assert dead_state(client) == {
        **NOW_TOKEN,
        "q": [returned(A, 1), returned(C, 1), returned(promoted(D, 500), 1), D],
        **dead_keys({"b": poison}),
        "{q}:dead-reasons": {"b": poisoned(3, "host ü:1")},
    }


def test_poison_twice(store: Store, client: redis.Redis) -> None:
    store.limits = Limits(max_deliveries=1)
    seed(client, {"{q}:unacked:A": {"1": "0" + A}})
    assert [store.release("q", "A", [1], counted=True) for _ in range(2)] == [1, 0]
    assert store.leases.reclaim("q", "A") == 0
    assert store.dead.ids("q") == ["a"]


def sha1(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()


def with_ids(**members: Any) -> str:
    return json.dumps({"body": "x", **members}, separators=(",", ":"))


@pytest.mark.parametrize(
    ("text", "id"),
    [
        (with_ids(headers={"id": "h"}, properties={"message_id": "m", "delivery_tag": "t"}), "h"),
        (with_ids(headers={"id": None}, properties={"message_id": "m"}), "m"),
        (with_ids(headers={}, properties={"message_id": "m", "delivery_tag": "t"}), "m"),
        (with_ids(headers={}, properties={"message_id": None, "delivery_tag": "t"}), "t"),
        (with_ids(headers=None, properties={"delivery_tag": "t"}), "t"),
        (with_ids(properties={"delivery_tag": 12}), "12"),
        (with_ids(headers=[], properties={"delivery_tag": "t"}), "t"),
        (with_ids(headers={"id": ["x"]}, properties={"delivery_tag": "t"}), "t"),
        (with_ids(headers={"id": True}, properties={"delivery_tag": "t"}), "t"),
        (with_ids(headers={"id": "ü\u4e2d"}), "ü\u4e2d"),
        (with_ids(headers={"id": "h"}, properties=None), "h"),
        (with_ids(headers={"id": "h"}, properties="text"), "h"),
        (promoted(with_ids(headers={"id": "h"}), 500), "h"),
        *(
            (text, sha1(text))
            for text in (
                with_ids(headers={}, properties={}),
                with_ids(headers=None, properties=None),
                "{}",
                "not JSON",
                '{"headers":{"id":"h"}',
                "",
                "[]",
                '"text"',
                "5",
                "null",
                '{"headers":' + "[" * 2000 + "]" * 2000 + "}",
            )
        ),
    ],
)
def test_id_of_poison(text: str, id: str, store: Store, client: redis.Redis) -> None:
    store.limits = Limits(max_deliveries=1)
    seed(client, {"{q}:unacked:A": {"1": "0" + text}})
    store.release("q", "A", [1], counted=True)
    assert dead_state(client) == {
        **dead_keys({id: "0" + text}),
        "{q}:dead-reasons": {id: poisoned(1)},
    }


def test_poison_under_a_taken_id(store: Store, client: redis.Redis) -> None:
    store.limits = Limits(max_deliveries=1)
    seed(client, {"{q}:unacked:A": {"1": "0" + A, "2": "0" + returned(A, 4)}})
    store.bury("q", "A", [(9, "a", "rejected", b"0{}")])
    store.release("q", "A", [1, 2], counted=True)
    after = dead_state(client)
    letters = {"a": "0{}", "a\x1f2": "0" + returned(A, 4), "a\x1f3": "0" + A}
    assert after["{q}:dead-messages"] == letters
    assert after["{q}:dead"] == dict.fromkeys(letters, 1000)
    assert after["{q}:dead-reasons"] == {
        "a": note("rejected"),
        "a\x1f2": poisoned(5),
        "a\x1f3": poisoned(1),
    }


# bury


def test_bury(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:unacked:A": {**HELD, "2": "3" + returned(B, 4)}})
    entries = [(1, "a", "rejected", b""), (2, "x", 'a "reason"', b""), (9, "y", "rejected", b"")]
    assert store.bury("q", "A", entries) == 2
    assert dead_state(client) == {
        "{q}:dead": {"a": 1000, "x": 1000},
        "{q}:dead-messages": {"a": "0" + A, "x": "3" + returned(B, 4)},
        "{q}:dead-reasons": {"a": note("rejected"), "x": note('a "reason"', 5)},
        "{q}:unacked:A": {"3": "0" + C},
    }


def test_bury_under_one_id(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:unacked:A": {**HELD, "4": "0" + A}})
    for tag in (1, 2):
        store.bury("q", "A", [(tag, "a", str(tag), b"")])
        store.now = "2000"
    store.bury("q", "A", [(3, "a", "3", b""), (4, "a", "4", b"")])
    assert dead_state(client) == {
        "{q}:dead": {"a": 1000, "a\x1f2": 2000, "a\x1f3": 2000, "a\x1f4": 2000},
        "{q}:dead-messages": {
            "a": "0" + A,
            "a\x1f2": "3" + B,
            "a\x1f3": "0" + C,
            "a\x1f4": "0" + A,
        },
        "{q}:dead-reasons": {
            "a": note("1"),
            "a\x1f2": note("2", at_ms=2000),
            "a\x1f3": note("3", at_ms=2000),
            "a\x1f4": note("4", at_ms=2000),
        },
    }


def test_id_that_is_free_again(store: Store, client: redis.Redis) -> None:
    for reason in ("1", "2", "3"):
        store.bury("q", "A", [(1, "a", reason, b"0{}")])
    store.dead.purge("q", ["a"])
    store.bury("q", "A", [(1, "a", "4", b"0{}")])
    assert {each.id: each.reason for each in store.dead.letters("q", store.dead.ids("q"))} == {
        "a": "4",
        "a\x1f2": "2",
        "a\x1f3": "3",
    }


def test_bury_twice(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:unacked:A": HELD})
    assert [store.bury("q", "A", [(1, "a", "rejected", b"")]) for _ in range(2)] == [1, 0]
    assert dead_state(client) == {
        **dead_keys({"a": "0" + A}),
        "{q}:unacked:A": {"2": "3" + B, "3": "0" + C},
    }


def test_bury_of_what_was_taken_for_good(store: Store, client: redis.Redis) -> None:
    record = b"6\xff is not text"
    assert store.bury("q", "A", [(1, "a", "rejected", record)]) == 1
    assert client.hgetall("{q}:dead-messages") == {b"a": record}
    (text,) = client.hvals("{q}:dead-reasons")
    assert json.loads(text) == json.loads(note("rejected"))
    assert client.zrange("{q}:dead", 0, -1, withscores=True) == [(b"a", 1000.0)]
    assert len(client.keys("*")) == 3


def test_time_of_burial_is_the_server_s(store: Store, client: redis.Redis) -> None:
    store.now = ""
    seconds, microseconds = client.time()
    store.bury("q", "A", [(1, "a", "rejected", b"0{}")])
    (letter,) = store.dead.letters("q", ["a"])
    assert 0 <= letter.at_ms - (seconds * 1000 + microseconds // 1000) < 5000
    assert state(client)["{q}:dead"] == {"a": letter.at_ms}


def buried_before(client: redis.Redis, at_ms: dict[str, int]) -> None:
    seed(
        client,
        {
            "{q}:dead": at_ms,
            "{q}:dead-messages": {id: f'0{{"id":"{id}"}}' for id in at_ms},
            "{q}:dead-reasons": {id: note(id, at_ms=at) for id, at in at_ms.items()},
        },
    )


def left(client: redis.Redis) -> list[str]:
    """Return the ids of the dead letters, which are the same in all three keys."""
    found = dead_state(client)
    ids = list(found.get("{q}:dead", {}))
    assert set(found.get("{q}:dead-messages", {})) == set(ids)
    assert set(found.get("{q}:dead-reasons", {})) == set(ids)
    return ids


# Listing.


def test_the_oldest_comes_first(store: Store, client: redis.Redis) -> None:
    assert (store.dead.count("q"), store.dead.ids("q"), store.dead.letters("q", [])) == (0, [], [])
    buried_before(client, {"b": 1000, "a": 1002, "c": 1001})
    assert store.dead.count("q") == 3
    pages = [store.dead.ids("q", start, 2) for start in range(4)]
    assert pages == [["b", "c"], ["c", "a"], ["a"], []]
    assert store.dead.letters("q", ["c", "missing", "b"]) == [
        DeadLetter(id, f'{{"id":"{id}"}}'.encode(), id, "A", at_ms, 1)
        for id, at_ms in [("c", 1001), ("b", 1000)]
    ]


def test_pages_behind_a_place(store: Store, client: redis.Redis) -> None:
    """What the place stands for may have gone."""
    order = [(1000, "b"), (1001, "Z"), (1001, "c"), (1001, "d"), (1002, "a")]
    buried_before(client, {id: at_ms for at_ms, id in order})
    assert store.dead.page("q") == order
    for n, place in enumerate(order):
        assert store.dead.page("q", place, 2) == order[n + 1 : n + 3]
    store.dead.purge("q", ["c", "b"])
    assert store.dead.page("q", (1001, "c")) == [(1001, "d"), (1002, "a")]
    assert store.dead.page("q", (1000, "b"), 1) == [(1001, "Z")]
    assert store.dead.page("other") == []


# How many are kept, and how long.


@pytest.mark.parametrize(
    ("limit", "kept"),
    [(1, "x"), (2, "cx"), (3, "bcx"), (4, "abcx"), (5, "abcx"), (8, "abcx"), (100, "abcx")],
)
@pytest.mark.parametrize("way", ["bury", "release", "reclaim"])
def test_the_oldest_go(way: str, limit: int, kept: str, store: Store, client: redis.Redis) -> None:
    store.limits = Limits(max_deliveries=1, dead_limit=limit)
    buried_before(client, {"b": 901, "a": 900, "c": 902})
    seed(client, {"{q}:unacked:A": {"1": "0" + message("x", headers={"id": "x"})}})
    if way == "bury":
        store.bury("q", "A", [(1, "x", "rejected", b"")])
    elif way == "release":
        store.release("q", "A", [1], counted=True)
    else:
        store.leases.reclaim("q", "A")
    assert left(client) == list(kept)


def test_more_at_once_than_are_kept(store: Store, client: redis.Redis) -> None:
    store.limits = Limits(dead_limit=3)
    buried_before(client, {"a": 900, "b": 901})
    assert store.bury("q", "A", [(1, f"x{n}", "rejected", b"0{}") for n in range(6)]) == 6
    assert left(client) == ["x3", "x4", "x5"]


@pytest.mark.parametrize(("now", "kept"), [(61_000, "cx"), (60_999, "bcx"), (60_001, "bcx")])
def test_the_aged_go(now: int, kept: str, store: Store, client: redis.Redis) -> None:
    store.limits = Limits(dead_seconds=60)
    buried_before(client, {"a": 1, "b": 1000, "c": 1001})
    store.now = str(now)
    store.bury("q", "A", [(1, "x", "rejected", b"0{}")])
    assert left(client) == list(kept)


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        (Limits(dead_limit=10), [1501, 502, 10, 10]),
        (Limits(dead_seconds=600), [1501, 502, 3, 4]),
        (Limits(dead_limit=1500, dead_seconds=600), [1500, 501, 3, 4]),
        (Limits(dead_limit=2500), [2500, 2500, 2500, 2500]),
    ],
)
def test_bounded_work(limits: Limits, kept: list[int], store: Store, client: redis.Redis) -> None:
    """A thousand go at once, for either reason, and whoever is buried next drops the others."""
    store.limits = limits
    store.now = "1000000"  # the keys themselves expire by the server's clock
    buried_before(client, {f"{n:04}": 100 + n // 100 for n in range(2500)})
    counts = []
    for n in range(4):
        store.bury("q", "A", [(1, f"x{n}", "rejected", b"0{}")])
        counts.append(len(left(client)))
        assert left(client)[-1] == f"x{n}"
    assert counts == kept


def test_bounds_are_of_one_queue(store: Store, client: redis.Redis) -> None:
    store.limits = Limits(dead_limit=1)
    for queue in ("q", "other", "q"):
        store.bury(queue, "A", [(1, "a", "rejected", b"0{}")])
    assert [store.dead.count(queue) for queue in ("q", "other")] == [1, 1]


# replay


def test_replay_now(store: Store, client: redis.Redis) -> None:
    """At the tails of their lists, in the order that was asked for."""
    letters = {"a": "0" + returned(A, 19), "b": "3" + B, "c": "0" + promoted(C, 500), "d": "0" + D}
    seed(client, {"q": ["first"], **dead_keys(letters)})
    assert store.dead.replay("q", ["c", "missing", "b", "a", "a"]) == 3
    assert dead_state(client) == {
        **NOW_TOKEN,
        "q": ["first", promoted(C, 500), A],
        MID: [B],
        **dead_keys({"d": "0" + D}),
    }


@pytest.mark.parametrize("due_ms", [2000, 500])
def test_replay_at_a_time(due_ms: int, store: Store, client: redis.Redis) -> None:
    letters = {"a": "0" + returned(A, 19), "b": "3" + promoted(B, 500), "c": "0" + C}
    seed(client, dead_keys(letters))
    assert store.dead.replay("q", ["a", "b", "missing"], due_ms) == 2
    assert dead_state(client) == {
        "{q}:partitions": {str(due_ms): due_ms},
        f"{{q}}:delayed:{due_ms}": {"a": due_ms, "b": due_ms},
        "{q}:messages": {"a": "0" + A, "b": "3" + B},
        "{q}:wake": {"due": due_ms},
        **dead_keys({"c": "0" + C}),
    }


@pytest.mark.parametrize(
    "text",
    [A, returned(A, 3), promoted(A, 500), returned(promoted(A, 500), 3)],
    ids=["fresh", "returned", "delayed", "both"],
)
@pytest.mark.parametrize("step", [0, 6])
def test_replayed_message_is_promoted_with_its_new_due_time_once(
    text: str, step: int, store: Store, client: redis.Redis
) -> None:
    seed(client, dead_keys({"a": f"{step}{text}"}))
    for n, due_ms in enumerate((2000, 3000)):
        assert store.dead.replay("q", ["a"], due_ms) == 1
        store.now = str(due_ms)
        answer = store.deliver("q", "A", 1, 1, lease_ms=9000)
        assert answer is not None
        assert answer.records == [f"{step}{promoted(A, due_ms)}".encode()]
        assert store.bury("q", "A", [(1, "a", "rejected", b"")]) == 1
        assert store.dead.letters("q", ["a"])[0].deliveries == 1, n


def test_what_looks_like_a_prefix_inside_stays(store: Store, client: redis.Redis) -> None:
    inner = {"due_ms": 6, "y": 1, "deliveries": 7}
    text = message('{"due_ms":5,', x=inner, z=',"deliveries":8}')
    assert '{"due_ms":6,' in text
    assert text.endswith(',\\"deliveries\\":8}"}')
    seed(client, dead_keys({"a": "0" + text}))
    store.dead.replay("q", ["a"], 2000)
    assert state(client)["{q}:messages"] == {"a": "0" + text}


def test_replayed_starts_to_count_anew(store: Store, client: redis.Redis) -> None:
    store.limits = Limits(max_deliveries=2)
    seed(client, dead_keys({"a": "0" + returned(A, 1)}))
    store.dead.replay("q", ["a"])
    for tag, ids in ((1, []), (2, ["a"])):
        store.deliver("q", "A", 1, tag, lease_ms=9000)
        store.release("q", "A", [tag], counted=True)
        assert store.dead.ids("q") == ids
    assert store.dead.letters("q", ["a"])[0].deliveries == 2


def test_replay_of_one_id_s_letters(store: Store, client: redis.Redis) -> None:
    """What follows the id in a dead letter's name belongs to the dead letters alone."""
    letters = {"a": "0" + A, "a\x1f2": "0" + B, "a\x1f3": "3" + C}
    seed(client, dead_keys(letters))
    assert store.dead.replay("q", ["a\x1f3"]) == 1
    assert store.dead.replay("q", ["a\x1f2"], 2000) == 1
    assert dead_state(client) == {
        MID: [C],
        "{q}:partitions": {"2000": 2000},
        "{q}:delayed:2000": {"a": 2000},
        "{q}:messages": {"a": "0" + B},
        "{q}:wake": {"now": 0, "due": 2000},
        **dead_keys({"a": "0" + A}),
    }
    assert store.dead.replay("q", ["a"], 3000) == 1
    assert dead_state(client) == {
        MID: [C],
        "{q}:partitions": {"2000": 2000},
        "{q}:delayed:2000": {"a": 2000, "a\x1f2": 3000},
        "{q}:messages": {"a": "0" + B, "a\x1f2": "0" + A},
        "{q}:duplicates": {"a": "2"},
        "{q}:wake": {"now": 0, "due": 2000},
    }


@pytest.mark.parametrize(
    ("waiting", "due_ms", "wake"),
    [
        ([], 0, {"now": 0}),
        ([], 5000, {"due": 5000}),
        ([4000], 0, {"now": 0}),
        ([4000], 5000, {}),
        ([4000], 4000, {}),
        ([4000], 3999, {"due": 3999}),
        ([4000], 500, {"due": 500}),
    ],
)
def test_replay_tells_of_it(
    waiting: list[int], due_ms: int, wake: dict[str, int], store: Store, client: redis.Redis
) -> None:
    store.schedule("q", [entry(str(due), due) for due in waiting])
    client.delete("{q}:wake")
    seed(client, dead_keys({"a": "0" + A}))
    assert store.dead.replay("q", ["missing"], due_ms) == 0
    assert "{q}:wake" not in state(client)
    assert store.dead.replay("q", ["a"], due_ms) == 1
    assert state(client).get("{q}:wake", {}) == wake


@pytest.mark.parametrize("due_ms", [0, 2000])
@pytest.mark.parametrize("ids", [[], ["missing"], ["a\x1f2", "A", ""]])
def test_replay_of_what_is_not_there(
    ids: list[str], due_ms: int, store: Store, client: redis.Redis
) -> None:
    before = dead_keys({"a": "0" + A})
    seed(client, before)
    assert store.dead.replay("q", ids, due_ms) == 0
    assert dead_state(client) == before


@pytest.mark.parametrize("due_ms", [0, 2000])
def test_replay_twice(due_ms: int, store: Store, client: redis.Redis) -> None:
    seed(client, dead_keys({"a": "0" + A}))
    assert store.dead.replay("q", ["a"], due_ms) == 1
    before = state(client)
    assert store.dead.replay("q", ["a"], due_ms) == 0
    assert state(client) == before


def test_replay_of_much_at_a_time_splits(client: redis.Redis) -> None:
    store = Store(client, partition_size=4, now="1000")
    ids = [str(n) for n in range(600)]
    store.schedule("q", [entry(f"w{n}", 2000 + n) for n in range(20)])
    buried_before(client, dict.fromkeys(ids, 900))
    assert store.dead.replay("q", ids, 2010) == 600
    assert store.size("q") == (0, 0, 620)
    assert left(client) == []


def test_replay_of_what_is_no_message(store: Store, client: redis.Redis) -> None:
    record = b"6\xff is not text"
    store.bury("q", "A", [(1, "a", "rejected", record)])
    assert store.dead.replay("q", ["a"]) == 1
    answer = store.deliver("q", "A", 1, 1, lease_ms=0)
    assert answer is not None
    assert answer.records == [record]


# purge_dead


def test_purge_dead(store: Store, client: redis.Redis) -> None:
    seed(client, {"q": [D], **dead_keys({"a": "0" + A, "b": "0" + B, "a\x1f2": "0" + C})})
    assert store.dead.purge("q", ["a", "missing", "a"]) == 1
    assert dead_state(client) == {"q": [D], **dead_keys({"b": "0" + B, "a\x1f2": "0" + C})}
    assert store.dead.purge("q", ["a", "a\x1f2", "b"]) == 2
    assert store.dead.purge("q", []) == 0
    assert state(client) == {"q": [D]}


def test_purge_of_many_dead_letters(store: Store, client: redis.Redis) -> None:
    ids = [str(n) for n in range(600)]
    buried_before(client, dict.fromkeys(ids, 900))
    assert store.dead.purge("q", ids) == 600
    assert left(client) == []
