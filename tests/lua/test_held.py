"""What happens to messages that a consumer holds."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from kombu_delayed.scripts import script
from kombu_delayed.store import Store
from tests.kit.state import SEPARATOR, entry, message, returned, seed, state

A, B, C, D = (message(body) for body in "abcd")
MID = "q" + SEPARATOR + "3"
HELD = {"1": "0" + A, "2": "3" + B, "3": "0" + C}


@pytest.fixture(autouse=True)
def _time_stands_still(store: Store) -> None:
    store.now = "1000"


def call(store: Store, name: str, consumer: str, limit: int) -> Any:
    """Run leave or reclaim once, where the store goes on until nothing is left."""
    keys = store.keys("q")
    given = {
        "partitions": keys.partitions,
        "delayed": keys.delayed,
        "messages": keys.messages,
        "duplicates": keys.duplicates,
        "wake": keys.wake,
        "armed": keys.armed,
        "consumers": keys.consumers,
        "unacked": keys.unacked(consumer),
        "ready": keys.ready,
        "consumer": consumer,
        "steps": keys.steps,
        "limit": limit,
    }
    if name == "reclaim":
        given["now"] = store.now
    return script(name)(store.client.execute_command, **given)


# ack


def ack(store: Store, consumer: str, tags: list[int]) -> None:
    store.ack("q", consumer, tags, on_error=lambda: pytest.fail("an ack was refused"))
    store.size("q")  # an ack does not wait; what comes after it does


@pytest.mark.parametrize(
    ("tags", "left"), [([1, 3], ["2"]), ([3, 99], ["1", "2"]), ([1, 2, 3], [])]
)
def test_ack(tags: list[int], left: list[str], store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:unacked:A": HELD, "{r}:unacked:A": HELD})
    ack(store, "A", tags)
    assert state(client).get("{q}:unacked:A", {}) == {tag: HELD[tag] for tag in left}
    assert state(client)["{r}:unacked:A"] == HELD


def test_ack_of_another_s_message(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:unacked:A": HELD})
    ack(store, "B", [1])
    assert state(client) == {"{q}:unacked:A": HELD}


def test_ack_of_any_number(store: Store, client: redis.Redis) -> None:
    client.hset("{q}:unacked:A", mapping={str(tag): "0x" for tag in range(10_000)})
    ack(store, "A", list(range(10_000)))
    assert state(client) == {}


def test_refused_ack_is_reported(store: Store, client: redis.Redis) -> None:
    client.set("{q}:unacked:A", "not a hash")
    refused: list[int] = []
    store.ack("q", "A", [1], on_error=lambda: refused.append(1))
    store.size("q")
    assert refused == [1]


# release


def test_release_to_the_heads_in_order(store: Store, client: redis.Redis) -> None:
    seed(client, {"q": [D], "{q}:unacked:A": HELD})
    assert store.release("q", "A", [1, 2, 3]) == 3
    assert state(client) == {
        "q": [returned(A, 0), returned(C, 0), D],
        MID: [returned(B, 0)],
        "{q}:wake": {"now": 0},
    }


@pytest.mark.parametrize("tags", [[3, 1], [1, 3], [1, 3, 1, 3]])
def test_order_of_the_tags_does_not_matter(
    tags: list[int], store: Store, client: redis.Redis
) -> None:
    seed(client, {"{q}:unacked:A": HELD})
    assert store.release("q", "A", tags) == 2
    assert state(client)["q"] == [returned(A, 0), returned(C, 0)]
    assert state(client)["{q}:unacked:A"] == {"2": "3" + B}


def test_tags_are_numbers(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:unacked:A": {"9": "0" + A, "10": "0" + B, "100": "0" + C}})
    store.release("q", "A", [10, 100, 9])
    assert state(client)["q"] == [returned(A, 0), returned(B, 0), returned(C, 0)]


def test_release_counts_attempts(store: Store, client: redis.Redis) -> None:
    seed(client, {"q": [A]})
    texts = []
    for counted in (True, False, True):
        store.deliver("q", "A", 1, 1, lease_ms=30_000)
        store.release("q", "A", [1], counted=counted)
        texts.append(state(client)["q"])
    assert texts == [[returned(A, 1)], [returned(A, 1)], [returned(A, 2)]]


def test_script_sorts_the_tags_itself(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:unacked:A": HELD})
    keys = store.keys("q")
    script("release")(
        client.execute_command,
        wake=keys.wake,
        unacked=keys.unacked("A"),
        ready=keys.ready,
        steps=keys.steps,
        counted=0,
        tags=[1, 3],
    )
    assert state(client)["q"] == [returned(A, 0), returned(C, 0)]


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ('{"deliveries":4}', '{"deliveries":4,"deliveries":1}'),
        ('{"a":1,"deliveries":9}', '{"a":1,"deliveries":10}'),
        ('{"a":{"b":1,"deliveries":4}}', '{"a":{"b":1,"deliveries":4},"deliveries":1}'),
        ('{"body":",\\"deliveries\\":4}"}', '{"body":",\\"deliveries\\":4}","deliveries":1}'),
        ("not an object", "not an object"),
        ("", ""),
    ],
)
def test_count_goes_to_the_end_of_the_envelope(
    text: str, after: str, store: Store, client: redis.Redis
) -> None:
    seed(client, {"{q}:unacked:A": {"1": "0" + text}})
    store.release("q", "A", [1], counted=True)
    assert state(client)["q"] == [after]


@pytest.mark.parametrize("tags", [[], [4], [7, 8, 9]])
def test_release_of_what_is_not_held(tags: list[int], store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:unacked:A": HELD})
    assert store.release("q", "A", tags) == 0
    assert state(client) == {"{q}:unacked:A": HELD}


def test_release_twice(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:unacked:A": HELD})
    assert [store.release("q", "A", [1]) for _ in range(2)] == [1, 0]
    assert state(client)["q"] == [returned(A, 0)]


def test_release_of_any_number(store: Store, client: redis.Redis) -> None:
    client.hset("{q}:unacked:A", mapping={str(tag): f"0{tag}" for tag in range(10_000)})
    assert store.release("q", "A", range(10_000)) == 10_000
    assert state(client)["q"] == [str(tag) for tag in range(10_000)]


# leave


def test_leave(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("d", 2000)])
    backlog = state(client)
    seed(
        client,
        {
            "{q}:unacked:A": HELD,
            "{q}:consumers": {"A": 9000, "B": 9000},
            "{q}:armed": "2000 A",
        },
    )
    client.delete("{q}:wake")
    store.leave("q", "A")
    assert state(client) == {
        **backlog,
        "q": [returned(A, 0), returned(C, 0)],
        MID: [returned(B, 0)],
        "{q}:consumers": {"B": 9000},
        "{q}:wake": {"now": 0, "due": 2000},
    }


def test_leave_passes_on_what_it_was_told(store: Store, client: redis.Redis) -> None:
    seed(client, {"q": [A], "{q}:consumers": {"A": 9000}})
    store.leave("q", "A")
    assert state(client) == {"q": [A], "{q}:wake": {"now": 0}}


def test_leave_keeps_another_s_promise(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:armed": "2000 B"})
    store.leave("q", "A")
    assert state(client) == {"{q}:armed": "2000 B"}


def test_leave_twice(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:unacked:A": HELD, "{q}:consumers": {"A": 9000}})
    store.leave("q", "A")
    before = state(client)
    store.leave("q", "A")
    assert state(client) == before


def test_leave_is_bounded(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:unacked:A": {str(n): f"0{n}" for n in range(25)}, "{q}:consumers": {"A": 9}})
    left = [call(store, "leave", "A", 10) for _ in range(3)]
    assert left == [15, 5, 0]
    assert state(client) == {"q": [str(n) for n in range(25)], "{q}:wake": {"now": 0}}


def test_leave_with_much(store: Store, client: redis.Redis) -> None:
    client.hset("{q}:unacked:A", mapping={str(tag): f"0{tag}" for tag in range(2000)})
    store.leave("q", "A")
    assert state(client)["q"] == [str(tag) for tag in range(2000)]


# reclaim


@pytest.mark.parametrize(
    "lease", [{}, {"{q}:consumers": {"A": 1000}}, {"{q}:consumers": {"A": 999}}]
)
def test_reclaim(lease: dict[str, Any], store: Store, client: redis.Redis) -> None:
    seed(client, {"q": [D], "{q}:unacked:A": HELD, **lease})
    assert store.reclaim("q", "A") == 3
    assert state(client) == {
        "q": [returned(A, 1), returned(C, 1), D],
        MID: [returned(B, 1)],
        "{q}:wake": {"now": 0},
    }


def test_lease_that_lasts_is_left_alone(store: Store, client: redis.Redis) -> None:
    before = {"{q}:unacked:A": HELD, "{q}:consumers": {"A": 1001}, "{q}:armed": "2000 A"}
    seed(client, before)
    assert store.reclaim("q", "A") == 0
    assert state(client) == before


def test_reclaim_is_bounded(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:unacked:A": {str(n): f"0{n}" for n in range(25)}, "{q}:consumers": {"A": 9}})
    assert call(store, "reclaim", "A", 10) == [10, 15]
    assert state(client)["{q}:consumers"] == {"A": 9}
    assert call(store, "reclaim", "A", 10) == [10, 5]
    assert call(store, "reclaim", "A", 10) == [5, 0]
    assert state(client) == {"q": [str(n) for n in range(25)], "{q}:wake": {"now": 0}}
    assert call(store, "reclaim", "A", 10) == [0, 0]


def test_reclaim_with_much(store: Store, client: redis.Redis) -> None:
    client.hset("{q}:unacked:A", mapping={str(tag): f"0{tag}" for tag in range(2000)})
    assert store.reclaim("q", "A") == 2000
    assert state(client)["q"] == [str(tag) for tag in range(2000)]


def test_reclaim_hands_the_promise_back(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("d", 2000)])
    seed(client, {"{q}:armed": "2000 A", "{q}:consumers": {"A": 500}})
    client.delete("{q}:wake")
    assert store.reclaim("q", "A") == 0
    after = state(client)
    assert after["{q}:wake"] == {"due": 2000}
    assert "{q}:armed" not in after
    assert "{q}:consumers" not in after


def test_reclaim_keeps_another_s_promise(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:armed": "2000 B", "{q}:consumers": {"A": 500}})
    store.reclaim("q", "A")
    assert state(client) == {"{q}:armed": "2000 B"}


def test_reclaim_tells_of_what_the_dead_was_told(store: Store, client: redis.Redis) -> None:
    """It may have died between taking the token and claiming."""
    seed(client, {"q": [A], "{q}:consumers": {"A": 500}})
    store.reclaim("q", "A")
    assert state(client) == {"q": [A], "{q}:wake": {"now": 0}}


def test_reclaimed_consumer_finds_nothing_of_its_own(store: Store, client: redis.Redis) -> None:
    seed(client, {"q": [A]})
    store.deliver("q", "A", 1, 1, lease_ms=100)
    store.now = "1100"
    store.reclaim("q", "A")
    before = state(client)
    ack(store, "A", [1])
    assert store.release("q", "A", [1]) == 0
    assert store.bury("q", "A", [(1, "a", "{}", b"")]) == 0
    assert store.park("q", "A", [(1, "a", 5000)]) == 0
    assert store.renew("q", "A", 100) is None
    assert store.deliver("q", "A", 1, 2, lease_ms=100, leased=True) is None
    assert state(client) == before


# renew


def test_renew(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:consumers": {"A": 1500, "B": 1001}})
    assert store.renew("q", "A", 30_000) == []
    assert state(client) == {"{q}:consumers": {"A": 31_000, "B": 1001}}


def test_renew_names_the_dead(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:consumers": {"A": 500, "B": 1000, "C": 999, "D": 1001}})
    assert store.renew("q", "A", 30_000) == ["C", "B"]
    assert state(client)["{q}:consumers"] == {"A": 31_000, "B": 1000, "C": 999, "D": 1001}


def test_lost_lease_is_not_renewed(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:consumers": {"B": 500}})
    assert store.renew("q", "A", 30_000) is None
    assert state(client) == {"{q}:consumers": {"B": 500}}


def test_the_dead_are_named_in_portions(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:consumers": {"A": 5000, **{f"dead{n}": 1 for n in range(150)}}})
    assert len(store.renew("q", "A", 30_000) or ()) == 100


# recover


@pytest.mark.parametrize(("seen", "tags"), [(0, [1, 2, 3, 10]), (2, [3, 10]), (9, [10]), (10, [])])
def test_recover(seen: int, tags: list[int], store: Store, client: redis.Redis) -> None:
    before = {"{q}:unacked:A": {"10": "0" + D, **HELD}}
    seed(client, before)
    records = {1: "0" + A, 2: "3" + B, 3: "0" + C, 10: "0" + D}
    assert store.recover("q", "A", seen) == [(tag, records[tag].encode()) for tag in tags]
    assert state(client) == before


def test_recover_many(store: Store, client: redis.Redis) -> None:
    client.hset("{q}:unacked:A", mapping={str(tag): "0x" for tag in range(10_000)})
    assert [tag for tag, _ in store.recover("q", "A", 99)] == list(range(100, 10_000))


# park


def test_park(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:unacked:A": HELD})
    assert store.park("q", "A", [(1, "a", 3000), (2, "b", 4000), (9, "x", 1500)]) == 2
    assert state(client) == {
        "{q}:partitions": {"3000": 3000},
        "{q}:delayed:3000": {"a": 3000, "b": 4000},
        "{q}:messages": {"a": "0" + A, "b": "3" + B},
        "{q}:unacked:A": {"3": "0" + C},
        "{q}:wake": {"due": 3000},
    }


def test_park_beside_what_waits_longer(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:unacked:A": HELD})
    store.schedule("q", [entry("d", 3500)])
    client.delete("{q}:wake")
    store.park("q", "A", [(1, "a", 4000)])
    assert "{q}:wake" not in state(client)
    store.park("q", "A", [(2, "b", 3000)])
    assert state(client)["{q}:wake"] == {"due": 3000}


def test_park_under_a_taken_id(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:unacked:A": HELD})
    store.schedule("q", [entry("a", 2000, body="other")])
    assert store.park("q", "A", [(1, "a", 3000)]) == 1
    after = state(client)
    assert after["{q}:messages"] == {"a": "0" + message("other"), "a\x1f2": "0" + A}
    assert after["{q}:duplicates"] == {"a": "2"}


def test_park_of_what_waits_already(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("a", 2000)])
    before = state(client)
    seed(client, {"{q}:unacked:A": {"1": "0" + A}})
    assert store.park("q", "A", [(1, "a", 2000)]) == 1
    assert state(client) == before


@pytest.mark.parametrize("entries", [[], [(9, "x", 3000)]])
def test_park_of_nothing(
    entries: list[tuple[int, str, int]], store: Store, client: redis.Redis
) -> None:
    seed(client, {"{q}:unacked:A": HELD})
    assert store.park("q", "A", entries) == 0
    assert state(client) == {"{q}:unacked:A": HELD}


def test_park_splits(client: redis.Redis) -> None:
    store = Store(client, partition_size=2, now="1000")
    seed(client, {"{q}:unacked:A": HELD})
    store.park("q", "A", [(1, "a", 3000), (2, "b", 4000), (3, "c", 5000)])
    assert len(state(client)["{q}:partitions"]) == 3


# bury


def test_bury(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:unacked:A": HELD})
    assert (
        store.bury(
            "q", "A", [(1, "a", '{"r":1}', b""), (2, "b", '{"r":2}', b""), (9, "x", "{}", b"")]
        )
        == 2
    )
    assert state(client) == {
        "{q}:dead": {"a": 1000, "b": 1000},
        "{q}:dead-messages": {"a": "0" + A, "b": "3" + B},
        "{q}:dead-reasons": {"a": '{"r":1}', "b": '{"r":2}'},
        "{q}:unacked:A": {"3": "0" + C},
    }


def test_bury_under_one_id(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:unacked:A": {**HELD, "4": "0" + A}})
    for tag in (1, 2):
        store.bury("q", "A", [(tag, "a", str(tag), b"")])
        store.now = "2000"
    store.bury("q", "A", [(3, "a", "3", b""), (4, "a", "4", b"")])
    assert state(client) == {
        "{q}:dead": {"a": 1000, "a\x1f2": 2000, "a\x1f3": 2000, "a\x1f4": 2000},
        "{q}:dead-messages": {
            "a": "0" + A,
            "a\x1f2": "3" + B,
            "a\x1f3": "0" + C,
            "a\x1f4": "0" + A,
        },
        "{q}:dead-reasons": {"a": "1", "a\x1f2": "2", "a\x1f3": "3", "a\x1f4": "4"},
    }


def test_bury_twice(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:unacked:A": HELD})
    assert [store.bury("q", "A", [(1, "a", "{}", b"")]) for _ in range(2)] == [1, 0]
    assert state(client)["{q}:dead"] == {"a": 1000}


def test_bury_of_what_was_taken_for_good(store: Store, client: redis.Redis) -> None:
    record = b"6\xff is not text"
    assert store.bury("q", "A", [(1, "a", "{}", record)]) == 1
    assert client.hgetall("{q}:dead-messages") == {b"a": record}
    assert client.hgetall("{q}:dead-reasons") == {b"a": b"{}"}
    assert client.zrange("{q}:dead", 0, -1, withscores=True) == [(b"a", 1000.0)]
