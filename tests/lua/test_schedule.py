from __future__ import annotations

import random

import pytest
import redis

from kombu_delayed.store.keys import SEPARATOR
from kombu_delayed.store.store import Entry, Scheduled, Store
from tests.kit.backlog import check_backlog, due_times
from tests.kit.state import entry, message, promoted, seed, state

A, B, C = (message(body) for body in "abc")


@pytest.fixture(autouse=True)
def _time_stands_still(store: Store) -> None:
    store.now = "1000"


def waiting(store: Store, **dues: int) -> None:
    """Schedule messages and take the token that this makes."""
    store.schedule("q", [entry(id, due) for id, due in dues.items()])
    store.client.delete("{q}:wake")


# Where a message goes.


def test_future(store: Store, client: redis.Redis) -> None:
    assert store.schedule("q", [entry("a", 2000)]) == Scheduled(delayed=1, ready=0, already=0)
    assert state(client) == {
        "{q}:partitions": {"2000": 2000},
        "{q}:delayed:2000": {"a": 2000},
        "{q}:messages": {"a": "0" + A},
        "{q}:wake": {"due": 2000},
    }


@pytest.mark.parametrize("due", ["1000", "999", "0", "-5000", "+0"])
def test_due_already(due: str, store: Store, client: redis.Redis) -> None:
    assert store.schedule("q", [entry("a", due)]) == Scheduled(delayed=0, ready=1, already=0)
    assert state(client) == {"q": [A], "{q}:wake": {"now": 0}}


def test_delay_counts_from_now(store: Store, client: redis.Redis) -> None:
    assert store.schedule("q", [entry("a", "+500")]) == (1, 0, 0)
    assert state(client) == {
        "{q}:partitions": {"1500": 1500},
        "{q}:delayed:1500": {"a": 1500},
        "{q}:messages": {"a": "0" + A},
        "{q}:wake": {"due": 1500},
    }


def test_some_of_each(store: Store, client: redis.Redis) -> None:
    entries = [entry("a", 2000), entry("b", 500), entry("c", 3000), entry("a", 2000)]
    assert store.schedule("q", entries) == Scheduled(delayed=2, ready=1, already=1)
    assert state(client) == {
        "q": [B],
        "{q}:partitions": {"2000": 2000},
        "{q}:delayed:2000": {"a": 2000, "c": 3000},
        "{q}:messages": {"a": "0" + A, "c": "0" + C},
        "{q}:wake": {"now": 0, "due": 2000},
    }


def test_priority_is_kept(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("a", 2000, step=6), entry("b", 500, step=9)])
    after = state(client)
    assert after["{q}:messages"] == {"a": "6" + A}
    assert after["q" + SEPARATOR + "9"] == [B]


def test_prefix_is_in_front_of_every_key(client: redis.Redis) -> None:
    store = Store(client, prefix="app:", now="1000")
    store.schedule("q", [entry("a", 2000), entry("b", 500), entry("a", 2000, body="x")])
    store.deliver("q", "A", 1, 1, lease_ms=100)
    assert all(key.startswith("app:") for key in state(client))


def test_nothing(store: Store, client: redis.Redis) -> None:
    assert store.schedule("q", []) == (0, 0, 0)
    assert state(client) == {}


def test_more_than_one_call_takes(store: Store, client: redis.Redis) -> None:
    entries = [entry(str(n), 2000 + n) for n in range(600)] + [entry(str(n), 0) for n in range(100)]
    assert store.schedule("q", entries) == (600, 100, 0)
    assert store.size("q") == (100, 0, 600)


def test_time_of_the_server(store: Store, client: redis.Redis) -> None:
    seconds, microseconds = client.time()
    store.now = ""
    store.schedule("q", [entry("a", "+60000")])
    (due_ms,) = state(client)["{q}:delayed:" + next(iter(state(client)["{q}:partitions"]))].values()
    assert 0 <= due_ms - 60_000 - (seconds * 1000 + microseconds // 1000) < 5000


def test_time_of_the_server_set_forward(store: Store) -> None:
    store.now = ""
    store.schedule("q", [entry("a", "+60000")])
    assert store.size("q") == (0, 0, 1)
    store.now = "+60000"
    assert store.size("q") == (0, 1, 1)


@pytest.mark.parametrize("due_ms", [253_402_300_800_000, 2**53 - 1])
def test_far_future_is_exact(due_ms: int, store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("a", due_ms)])
    assert state(client) == {
        "{q}:partitions": {str(due_ms): due_ms},
        f"{{q}}:delayed:{due_ms}": {"a": due_ms},
        "{q}:messages": {"a": "0" + A},
        "{q}:wake": {"due": due_ms},
    }
    answer = store.deliver("q", "A", 1, 1, lease_ms=0)
    assert answer is not None
    assert answer.next_due_ms == due_ms
    store.now = str(due_ms)
    answer = store.deliver("q", "A", 1, 1, lease_ms=0)
    assert answer is not None
    assert answer.records == [("0" + promoted(A, due_ms)).encode()]


def test_body_is_kept_as_it_is(store: Store, client: redis.Redis) -> None:
    text = '{"body": "ü\\u0000\\"}", "empty": [], "big": 12345678901234567890, "properties": {}}'
    store.schedule("q", [Entry("a", 0, text, "2000")])
    assert state(client)["{q}:messages"] == {"a": "0" + text}


# The same id again.


def test_same_message_twice(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("a", 2000)])
    before = state(client)
    assert store.schedule("q", [entry("a", 2000)]) == Scheduled(delayed=0, ready=0, already=1)
    assert state(client) == before


def test_publisher_that_sends_again_renames_the_delivery_only(store: Store) -> None:
    def sent(tag: str) -> Entry:
        properties = f'{{"delivery_tag": "{tag}", "reply_to": "r"}}'
        text = f'{{"body": "x", "properties": {properties}}}'
        return Entry("a", 0, text, "2000")

    assert store.schedule("q", [sent("first")]) == (1, 0, 0)
    assert store.schedule("q", [sent("second")]) == (0, 0, 1)


def test_same_id_other_message(store: Store, client: redis.Redis) -> None:
    entries = [entry("a", 2000), entry("a", 3000, body="b"), entry("a", 2500, body="c")]
    assert store.schedule("q", entries) == (3, 0, 0)
    assert state(client) == {
        "{q}:partitions": {"2000": 2000},
        "{q}:delayed:2000": {"a": 2000, "a\x1f2": 3000, "a\x1f3": 2500},
        "{q}:messages": {"a": "0" + A, "a\x1f2": "0" + B, "a\x1f3": "0" + C},
        "{q}:duplicates": {"a": "3"},
        "{q}:wake": {"due": 2000},
    }


def test_same_id_other_priority(store: Store, client: redis.Redis) -> None:
    assert store.schedule("q", [entry("a", 2000), entry("a", 2000, step=3)]) == (2, 0, 0)
    assert state(client)["{q}:messages"] == {"a": "0" + A, "a\x1f2": "3" + A}


def test_duplicate_sent_again(store: Store, client: redis.Redis) -> None:
    entries = [entry("a", 2000), entry("a", 3000, body="b")]
    assert store.schedule("q", entries) == (2, 0, 0)
    before = state(client)
    assert store.schedule("q", entries) == (0, 0, 2)
    assert state(client) == before


def test_duplicate_sent_again_after_the_first_has_left(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("a", 2000), entry("a", 3000, body="b")])
    store.now = "2000"
    store.deliver("q", "A", 1, 1, lease_ms=0)
    before = state(client)
    assert store.schedule("q", [entry("a", 3000, body="b")]) == Scheduled(0, 0, already=1)
    assert state(client)["{q}:messages"] == before["{q}:messages"] == {"a\x1f2": "0" + B}


def test_free_place_between_duplicates_is_taken(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("a", 2000), entry("a", 3000, body="b"), entry("a", 4000, body="c")])
    store.now = "2000"
    store.deliver("q", "A", 1, 1, lease_ms=0)
    assert store.schedule("q", [entry("a", 5000, body="d")]) == (1, 0, 0)
    after = state(client)
    assert after["{q}:messages"] == {"a": "0" + message("d"), "a\x1f2": "0" + B, "a\x1f3": "0" + C}
    assert after["{q}:duplicates"] == {"a": "3"}


def test_duplicates_are_forgotten_when_they_leave(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("a", 2000), entry("a", 3000, body="b"), entry("a", 4000, body="c")])
    for now, left in [("2000", {"a": "3"}), ("3000", {"a": "3"}), ("4000", None)]:
        store.now = now
        store.deliver("q", "A", 1, 1, lease_ms=0)
        assert state(client).get("{q}:duplicates") == left


def test_first_message_outlives_its_duplicates(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("a", 4000), entry("a", 3000, body="b")])
    store.now = "3000"
    store.deliver("q", "A", 1, 1, lease_ms=0)
    after = state(client)
    assert after["{q}:messages"] == {"a": "0" + A}
    assert "{q}:duplicates" not in after


@pytest.mark.parametrize("id", ["a\x1f2", "\x1f", "", "a b", "ü", "{q}", "a'"])
def test_odd_ids(id: str, store: Store, client: redis.Redis) -> None:
    assert store.schedule("q", [entry(id, 2000, body="x"), entry(id, 2000, body="y")]) == (2, 0, 0)
    assert len(state(client)["{q}:messages"]) == 2
    store.now = "2000"
    answer = store.deliver("q", "A", 9, 1, lease_ms=0)
    assert answer is not None
    assert len(answer.records) == 2
    assert set(state(client)) <= {"{q}:wake"}


# Expiry of the queue.


def test_all_but_the_backlog_expires(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("a", 2000), entry("b", 500), entry("c", 500, step=3)], 60_000)
    for key in state(client):
        if key in ("q", "q" + SEPARATOR + "3", "{q}:wake"):
            assert 0 < client.pttl(key) <= 60_000
        else:
            assert client.pttl(key) > 110_000 if key == "{q}:expires" else client.pttl(key) == -1


def test_no_expiry(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("a", 2000), entry("b", 500)])
    assert {client.pttl(key) for key in state(client)} == {-1}


# Wake tokens.


@pytest.mark.parametrize(
    ("before", "due", "token"),
    [
        ({}, 2000, {"due": 2000}),
        ({"b": 3000}, 2000, {"due": 2000}),
        ({"b": 2000}, 2000, None),
        ({"b": 2000}, 3000, None),
        ({"b": 3000, "c": 4000}, 3500, None),
    ],
)
def test_only_a_new_earliest_due_time_makes_a_token(
    before: dict[str, int], due: int, token: object, store: Store, client: redis.Redis
) -> None:
    waiting(store, **before)
    store.schedule("q", [entry("a", due)])
    assert state(client).get("{q}:wake") == token


def test_earlier_token_replaces_a_later_one(store: Store, client: redis.Redis) -> None:
    tokens = []
    for id, due in [("a", 4000), ("b", 3000), ("c", 3500), ("d", 2000)]:
        store.schedule("q", [entry(id, due)])
        tokens.append(state(client)["{q}:wake"])
    assert tokens == [{"due": 4000}, {"due": 3000}, {"due": 3000}, {"due": 2000}]


def test_earliest_of_a_call_counts(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("a", 4000), entry("b", 2000), entry("c", 3000)])
    assert state(client)["{q}:wake"] == {"due": 2000}


def test_message_that_was_there_already_makes_no_token(store: Store, client: redis.Redis) -> None:
    waiting(store, a=2000)
    store.schedule("q", [entry("a", 2000)])
    assert "{q}:wake" not in state(client)


def test_now_and_due_are_two_tokens(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("a", 500), entry("b", 2000)])
    assert state(client)["{q}:wake"] == {"now": 0, "due": 2000}


# Partitions.


def check_dues(client: redis.Redis, dues: list[int]) -> None:
    check_backlog(client)
    assert [due for own in due_times(client) for due in own] == sorted(dues)


def orders() -> dict[str, list[int]]:
    up = list(range(2000, 2200))
    shuffled = random.Random(7).sample(up, len(up))
    clustered = [2000 + 10 * random.Random(n).randrange(12) for n in range(200)]
    inside_out = [due for pair in zip(up[100:], reversed(up[:100]), strict=True) for due in pair]
    return {
        "ascending": up,
        "descending": up[::-1],
        "random": shuffled,
        "clustered": clustered,
        "inside out": inside_out,
    }


@pytest.mark.parametrize("size", [2, 3, 4, 8, 50])
@pytest.mark.parametrize("order", orders())
def test_split(order: str, size: int, client: redis.Redis) -> None:
    store = Store(client, partition_size=size, now="1000")
    dues = orders()[order]
    for n in range(0, len(dues), 20):
        store.schedule("q", [entry(str(n + i), due) for i, due in enumerate(dues[n : n + 20])])
        check_dues(client, dues[: n + 20])
    for own in due_times(client):
        assert len(own) < size or len(set(own)) == 1


def test_split_when_the_size_is_reached(client: redis.Redis) -> None:
    store = Store(client, partition_size=4, now="1000")
    store.schedule("q", [entry("a", 2001), entry("b", 2002), entry("d", 2004)])
    assert due_times(client) == [[2001, 2002, 2004]]
    store.schedule("q", [entry("c", 2003)])
    assert state(client) == {
        "{q}:partitions": {"2001": 2001, "2003": 2003},
        "{q}:delayed:2001": {"a": 2001, "b": 2002},
        "{q}:delayed:2003": {"c": 2003, "d": 2004},
        "{q}:messages": {id: "0" + message(id) for id in "abcd"},
        "{q}:wake": {"due": 2001},
    }


@pytest.mark.parametrize("batch", [1, 7, 100])
def test_what_comes_in_order_fills_partitions(batch: int, client: redis.Redis) -> None:
    store = Store(client, partition_size=20, now="1000")
    dues = list(range(2000, 2100))
    for n in range(0, len(dues), batch):
        store.schedule("q", [entry(str(due), due) for due in dues[n : n + batch]])
    assert [len(own) for own in due_times(client)] == [18, 18, 18, 18, 18, 10]
    check_dues(client, dues)


def test_message_before_the_first_partition_joins_it(client: redis.Redis) -> None:
    store = Store(client, partition_size=4, now="1000")
    store.schedule("q", [entry("a", 3000), entry("b", 2000)])
    assert due_times(client) == [[2000, 3000]]


def test_messages_before_the_first_partition_are_found_first(client: redis.Redis) -> None:
    store = Store(client, partition_size=3, now="1000")
    store.schedule("q", [entry("a", 5000), entry("b", 4000), entry("c", 3000), entry("d", 2000)])
    store.now = "3000"
    answer = store.deliver("q", "A", 9, 1, lease_ms=0)
    assert answer is not None
    assert len(answer.records) == 2
    assert answer.next_due_ms == 4000


def test_equal_due_times_are_never_split(client: redis.Redis) -> None:
    store = Store(client, partition_size=4, now="1000")
    store.schedule("q", [entry(str(n), 2000) for n in range(50)])
    assert due_times(client) == [[2000] * 50]


@pytest.mark.parametrize(
    ("dues", "expected"),
    [
        ([2000] * 9 + [3000], [[2000] * 9, [3000]]),
        ([3000] * 9 + [2000], [[2000], [3000] * 9]),
        ([2000] * 9 + [1500, 3000], [[1500], [2000] * 9, [3000]]),
    ],
    ids=["one above", "one below", "both"],
)
def test_neighbours_leave_an_equal_run(
    dues: list[int], expected: list[list[int]], client: redis.Redis
) -> None:
    store = Store(client, partition_size=4, now="1000")
    store.schedule("q", [entry(str(n), due) for n, due in enumerate(dues)])
    assert due_times(client) == expected
    check_dues(client, dues)


@pytest.mark.parametrize("neighbour", [1999, 2001])
def test_smaller_side_moves(neighbour: int, client: redis.Redis) -> None:
    store = Store(client, partition_size=4, now="1000")
    store.schedule("q", [entry(str(n), 2000) for n in range(50)])
    assert "{q}:delayed:2000" in state(client)
    store.schedule("q", [entry("x", neighbour)])
    after = state(client)
    assert len(after["{q}:delayed:2000"]) == 50
    (other,) = [k for k in after if k.startswith("{q}:delayed:") and k != "{q}:delayed:2000"]
    assert after[other] == {"x": neighbour}


def test_big_run_moves_in_pieces(client: redis.Redis) -> None:
    """After a change of the partition size more may have to move than one command takes."""
    Store(client, partition_size=100_000, now="1000").schedule(
        "q", [entry(str(n), 2000 + n) for n in range(5000)]
    )
    Store(client, partition_size=100, now="1000").schedule("q", [entry("x", 3000)])
    assert list(map(len, due_times(client))) == [2500, 2501]
    check_dues(client, [*range(2000, 7000), 3000])


def test_name_of_a_living_partition_is_not_taken(client: redis.Redis) -> None:
    store = Store(client, partition_size=2, now="1000")
    dues = [2000, 2001, 1900, 1901, 2000, 1999, 1901, 2001]
    for n, due in enumerate(dues):
        store.schedule("q", [entry(str(n), due)])
        check_dues(client, dues[: n + 1])


@pytest.mark.parametrize("order", orders())
def test_partitions_stay_compact(order: str, store: Store, client: redis.Redis) -> None:
    sizes = client.config_get("zset-max-*-entries")
    assert set(sizes.values()) == {"128"}
    dues = [due + 200 * n for n in range(5) for due in orders()[order]]
    store.schedule("q", [entry(str(n), due) for n, due in enumerate(dues)])
    check_dues(client, dues)
    for key, value in state(client).items():
        if key.startswith("{q}:delayed:") and len(set(value.values())) > 1:
            assert client.object("encoding", key) in (b"listpack", b"ziplist"), (key, len(value))


def test_seed_and_state_are_inverse(client: redis.Redis) -> None:
    before = {"s": "x", "l": ["1", "2"], "h": {"a": "b"}, "z": {"m": 5}}
    seed(client, before)
    assert state(client) == before
