"""Dead letters: how messages become one, how many are kept, and how they come back."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
import redis

from kombu_delayed.message.envelope import open_envelope
from kombu_delayed.store.dead_letters import UNREADABLE_NOTE, DeadLetter
from kombu_delayed.store.keys import SEPARATOR
from kombu_delayed.store.store import Limits, Store
from tests.kit.backlog import check_backlog
from tests.kit.claims import deliver
from tests.kit.state import dead_state, entry, message, note, promoted, returned, seed

A, B, C, D = (message(body, headers={"id": body}) for body in "abcd")
MID = "q" + SEPARATOR + "3"
HELD = {"1": "0" + A, "2": "3" + B, "3": "0" + C}
NOW_TOKEN = {"{q}:wake": {"now": 0}}
WAYS = pytest.mark.parametrize("way", ["release", "reclaim"])


def dead_keys(letters: dict[str, str], **notes: str) -> dict[str, Any]:
    """Return the keys of letters that A rejected at 1000, or that have other notes."""
    return {
        "{q}:dead": dict.fromkeys(letters, 1000),
        "{q}:dead-messages": letters,
        "{q}:dead-reasons": dict.fromkeys(letters, note("rejected")) | notes,
    }


def poisoned(deliveries: int) -> str:
    return note(f"delivered {deliveries} times without success", deliveries)


def fail(store: Store, way: str, tag: int) -> int:
    """The task has failed, or its worker has died."""
    if way == "reclaim":
        return store.leases.reclaim("q", "A")
    return store.release("q", "A", [tag], counted=True)


@WAYS
@pytest.mark.parametrize(
    ("limit", "before", "is_buried"),
    [
        (2, 0, False),
        (2, 1, True),
        (1, None, True),
        (2, None, False),
        (0, 1_000_000, False),
    ],
)
def test_an_attempt_at_the_limit(
    way: str, limit: int, before: int | None, is_buried: bool, store: Store, client: redis.Redis
) -> None:
    store.limits = Limits(max_deliveries=limit)
    record = "3" + (A if before is None else returned(A, before))
    seed(client, {**NOW_TOKEN, "q": [D], "{q}:unacked:A": {"7": record}})
    assert fail(store, way, 7) == 1
    count = (before or 0) + 1
    letter, ready = dead_keys({"a": record}, a=poisoned(count)), {MID: [returned(A, count)]}
    assert dead_state(client) == {**NOW_TOKEN, "q": [D], **(letter if is_buried else ready)}


def with_ids(**members: Any) -> str:
    return json.dumps({"body": "x", **members}, separators=(",", ":"))


@pytest.mark.parametrize(
    ("text", "id"),
    [
        (with_ids(headers={"id": "h"}, properties={"message_id": "m", "delivery_tag": "t"}), "h"),
        (with_ids(headers={"id": None}, properties={"message_id": "m"}), "m"),
        (with_ids(headers={}, properties={"message_id": "m", "delivery_tag": "t"}), "m"),
        (with_ids(headers=None, properties={"delivery_tag": "t"}), "t"),
        (with_ids(properties={"delivery_tag": 12}), "12"),
        (with_ids(headers={"id": ["x"]}, properties={"delivery_tag": "t"}), "t"),
        (with_ids(headers={"id": "ü\u4e2d"}), "ü\u4e2d"),
        (with_ids(headers={"id": "h"}, properties="text"), "h"),
        (promoted(with_ids(headers={"id": "h"}), 500), "h"),
        (with_ids(headers=None, properties=None), None),
        *((text, None) for text in ("not JSON", '{"headers":{"id":"h"}', "", "[]", "5", "null")),
        pytest.param('{"headers":' + "[" * 2000 + "]" * 2000 + "}", None, id="deep"),
    ],
)
def test_id_of_poison(text: str, id: str | None, store: Store, client: redis.Redis) -> None:
    """A message without an id has the hash of its text."""
    id = hashlib.sha1(text.encode()).hexdigest() if id is None else id
    store.limits = Limits(max_deliveries=1)
    seed(client, {"{q}:unacked:A": {"1": "0" + text}})
    fail(store, "release", 1)
    assert dead_state(client) == dead_keys({id: "0" + text}, **{id: poisoned(1)})


def test_bury(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:unacked:A": {**HELD, "2": "3" + returned(B, 4)}})
    entries = [(1, "a", "rejected", b""), (2, "x", 'a "reason"', b""), (9, "y", "rejected", b"")]
    for count in (2, 0):
        assert store.bury("q", "A", entries) == count
        assert dead_state(client) == {
            **dead_keys({"a": "0" + A, "x": "3" + returned(B, 4)}, x=note('a "reason"', 5)),
            "{q}:unacked:A": {"3": "0" + C},
        }


def test_what_was_taken_for_good_and_is_no_message(store: Store, client: redis.Redis) -> None:
    record = b"6\xff is not text"
    assert store.bury("q", "A", [(1, "a", "rejected", record)]) == 1
    assert client.hgetall("{q}:dead-messages") == {b"a": record}
    assert store.dead.letters("q", ["a"])[0].reason == "rejected"
    assert store.dead.replay("q", ["a"]) == 1
    assert deliver(store).records == [record]


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


def test_pages_behind_a_place(store: Store, client: redis.Redis) -> None:
    """The letter that a place stands for may be gone."""
    order = [(1000, "b"), (1001, "Z"), (1001, "c"), (1001, "d"), (1002, "a")]
    buried_before(client, {id: at_ms for at_ms, id in order})
    assert store.dead.page("q") == order
    for n, place in enumerate(order):
        assert store.dead.page("q", place, 2) == order[n + 1 : n + 3]
    store.dead.purge("q", ["c", "b"])
    assert store.dead.page("q", (1001, "c")) == [(1001, "d"), (1002, "a")]
    assert store.dead.page("q", (1000, "b"), 1) == [(1001, "Z")]
    assert store.dead.page("other") == []


@pytest.mark.parametrize(
    "text",
    [
        b"junk",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"reason": "r", "consumer": "A", "at_ms": 5}',
        b'{"reason": "r", "consumer": "A", "at_ms": Infinity, "deliveries": 1}',
    ],
)
def test_a_note_that_cannot_be_read(text: bytes, store: Store, client: redis.Redis) -> None:
    seed(client, dead_keys({"a": "0" + A, "b": "0" + B}))
    client.hset("{q}:dead-reasons", "a", text)
    broken, whole = store.dead.letters("q", ["a", "b"])
    assert broken == DeadLetter("a", A.encode(), UNREADABLE_NOTE, "", 1000, 0)
    assert whole == DeadLetter("b", B.encode(), "rejected", "A", 1000, 1)
    assert store.dead.replay("q", ["a"]) == 1


def test_a_note_of_a_newer_version(store: Store, client: redis.Redis) -> None:
    seed(client, dead_keys({"a": "0" + A}, a=json.dumps({**json.loads(note("why")), "new": [1]})))
    assert store.dead.letters("q", ["a"])[0].reason == "why"


def test_the_oldest_go_after_the_clock_was_set_back(store: Store) -> None:
    store.limits = Limits(dead_limit=2)
    for now, id in (("5000", "b"), ("6000", "c"), ("4000", "a"), ("4000", "d")):
        store.now = now
        store.bury("q", "A", [(0, id, "because", b"0{}")])
    assert store.dead.ids("q") == ["a", "d"]
    assert [each.at_ms for each in store.dead.letters("q", ["a", "d"])] == [4000, 4000]


def test_a_clock_that_was_far_ahead_does_not_keep_later_letters(store: Store) -> None:
    day_ms = 86_400_000
    store.limits = Limits(dead_seconds=10 * 86_400)
    for now, id in ((900 * day_ms, "a"), (0, "b"), (20 * day_ms, "c")):
        store.now = str(now)
        store.bury("q", "A", [(0, id, "because", b"0{}")])
    assert store.dead.ids("q") == ["c", "a"]


@pytest.mark.parametrize(("limit", "kept"), [(1, "x"), (3, "bcx"), (4, "abcx"), (8, "abcx")])
@pytest.mark.parametrize("way", ["bury", "release", "reclaim"])
def test_the_oldest_go(way: str, limit: int, kept: str, store: Store, client: redis.Redis) -> None:
    store.limits = Limits(max_deliveries=1, dead_limit=limit)
    buried_before(client, {"b": 901, "a": 900, "c": 902})
    seed(client, {"{q}:unacked:A": {"1": "0" + message("x", headers={"id": "x"})}})
    if way == "bury":
        store.bury("q", "A", [(1, "x", "rejected", b"")])
    else:
        fail(store, way, 1)
    assert left(client) == list(kept)


@pytest.mark.parametrize(("now", "kept"), [("61000", "cx"), ("60999", "bcx")])
def test_the_aged_go(now: str, kept: str, store: Store, client: redis.Redis) -> None:
    store.limits = Limits(dead_seconds=60)
    buried_before(client, {"a": 1, "b": 1000, "c": 1001})
    store.now = now
    store.bury("q", "A", [(1, "x", "rejected", b"0{}")])
    assert left(client) == list(kept)


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        (Limits(dead_limit=10), [1501, 502, 10, 10]),
        (Limits(dead_seconds=600), [1501, 502, 3, 4]),
        (Limits(dead_limit=1500, dead_seconds=600), [1500, 501, 3, 4]),
    ],
)
def test_bounded_work(limits: Limits, kept: list[int], store: Store, client: redis.Redis) -> None:
    """A burial drops at most a thousand, for either reason; the next burials drop the others."""
    store.limits = limits
    store.now = "1000000"  # the keys themselves expire by the server's clock
    buried_before(client, {f"{n:04}": 100 + n // 100 for n in range(2500)})
    counts = []
    for n in range(4):
        store.bury("q", "A", [(1, f"x{n}", "rejected", b"0{}")])
        ids = left(client)
        assert ids[-1] == f"x{n}"
        counts.append(len(ids))
    assert counts == kept


def test_replayed_starts_to_count_anew(store: Store, client: redis.Redis) -> None:
    store.limits = Limits(max_deliveries=2)
    seed(client, dead_keys({"a": "0" + returned(A, 1)}))
    store.dead.replay("q", ["a"])
    for tag, ids in ((1, []), (2, ["a"])):
        deliver(store, tag=tag)
        fail(store, "release", tag)
        assert store.dead.ids("q") == ids
    assert store.dead.letters("q", ["a"])[0].deliveries == 2


def test_a_time_before_1970_is_past(store: Store, client: redis.Redis) -> None:
    waits = '{"wait":{"first_due_ms":500},' + B[1:]
    seed(client, dead_keys({"a": "0" + A, "b": "0" + waits}))
    assert store.dead.replay("q", ["a", "b"], -5000) == 2
    first, second = deliver(store).records
    assert first == b"0" + A.encode()
    assert open_envelope(second[1:], 1).id == "b"


def test_many_at_once(store: Store, client: redis.Redis) -> None:
    store.partition_size = 4
    ids = [str(n) for n in range(600)]
    store.schedule("q", [entry(f"w{n}", 2000 + n) for n in range(20)])
    buried_before(client, dict.fromkeys(ids, 900))
    assert store.dead.purge("q", [*ids[:300], "missing", *ids[:9]]) == 300
    assert store.dead.replay("q", ids[300:], 2010) == 300
    assert len(check_backlog(client)) == 320
    assert left(client) == []
