from __future__ import annotations

import random

import pytest
import redis

from kombu_delayed.store.keys import SEPARATOR
from kombu_delayed.store.store import Entry, Scheduled, Store
from tests.kit.backlog import check_backlog, due_times
from tests.kit.claims import deliver, records
from tests.kit.state import entry, message, promoted, state

A, B = message("a"), message("b")


@pytest.mark.parametrize(
    ("due", "due_ms"),
    [("2000", 2000), ("+500", 1500), *((str(at), at) for at in (253_402_300_800_000, 2**53 - 1))],
)
def test_future(due: str, due_ms: int, store: Store, client: redis.Redis) -> None:
    assert store.schedule("q", [entry("a", due)]) == Scheduled(delayed=1, ready=0, already=0)
    assert state(client) == {
        "{q}:partitions": {str(due_ms): due_ms},
        f"{{q}}:delayed:{due_ms}": {"a": due_ms},
        "{q}:messages": {"a": "0" + A},
        "{q}:wake": {"due": due_ms},
    }
    assert deliver(store).next_due_ms == due_ms
    store.now = str(due_ms)
    assert records(deliver(store)) == ["0" + promoted(A, due_ms)]


@pytest.mark.parametrize("due", ["1000", "999", "0", "-5000", "+0"])
def test_due_already(due: str, store: Store, client: redis.Redis) -> None:
    assert store.schedule("q", [entry("a", due)]) == Scheduled(delayed=0, ready=1, already=0)
    assert state(client) == {"q": [A], "{q}:wake": {"now": 0}}


def test_more_than_one_call_takes(store: Store) -> None:
    assert store.schedule("q", []) == (0, 0, 0)
    entries = [entry(str(n), 2000 + n) for n in range(600)] + [entry(str(n), 0) for n in range(100)]
    assert store.schedule("q", entries) == (600, 100, 0)
    assert store.size("q") == (100, 0, 600)


def test_time_of_the_server(store: Store, client: redis.Redis) -> None:
    seconds, microseconds = client.time()
    store.now = ""
    store.schedule("q", [entry("a", "+60000")])
    (due_ms,) = check_backlog(client).values()
    assert 0 <= due_ms - 60_000 - (seconds * 1000 + microseconds // 1000) < 5000
    assert store.size("q") == (0, 0, 1)
    store.now = "+60000"
    assert store.size("q") == (0, 1, 1)


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
    entries = [entry("a", 2000), entry("a", 3000, body="b"), entry("a", 2500, step=3)]
    for counts in ((3, 0, 0), (0, 0, 3)):
        assert store.schedule("q", entries) == counts
        assert state(client) == {
            "{q}:partitions": {"2000": 2000},
            "{q}:delayed:2000": {"a": 2000, "a\x1f2": 3000, "a\x1f3": 2500},
            "{q}:messages": {"a": "0" + A, "a\x1f2": "0" + B, "a\x1f3": "3" + A},
            "{q}:duplicates": {"a": "3"},
            "{q}:wake": {"due": 2000},
        }


@pytest.mark.parametrize(("dues", "forgotten_at"), [((2, 3, 4), 4), ((4, 3, 2), 3)])
def test_duplicates_are_forgotten_when_they_leave(
    dues: tuple[int, ...], forgotten_at: int, store: Store, client: redis.Redis
) -> None:
    store.schedule("q", [entry("a", 1000 * due, body=str(due)) for due in dues])
    for now in (2, 3, 4):
        store.now = str(1000 * now)
        assert len(deliver(store).records) == 1
        assert ("{q}:duplicates" in state(client)) == (now < forgotten_at)


def test_messages_due_at_the_end_of_time_are_in_their_partitions(
    store: Store, client: redis.Redis
) -> None:
    store.partition_size = 4
    last = 253_402_300_799_999
    store.schedule("q", [entry(f"a{n}", last - n) for n in (4, 3, 1, 0)])
    assert len(state(client)["{q}:partitions"]) == 2
    store.partition_size = 100
    store.schedule("q", [entry(f"b{n}", last - n) for n in (4, 3, 0)])
    assert len(check_backlog(client)) == 7


@pytest.mark.parametrize("expires_ms", [60_000, 0])
def test_all_but_the_backlog_expires(expires_ms: int, store: Store, client: redis.Redis) -> None:
    sent = [entry("a", 2000), entry("b", 500), entry("c", 500, step=3)]
    store.schedule("q", sent, expires_ms)
    for key in state(client):
        if expires_ms and key in ("q", "q" + SEPARATOR + "3", "{q}:wake"):
            assert 0 < client.pttl(key) <= 60_000
        else:
            assert client.pttl(key) > 110_000 if key == "{q}:expires" else client.pttl(key) == -1


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


@pytest.mark.parametrize("size", [2, 3, 50])
@pytest.mark.parametrize("order", orders())
def test_split(order: str, size: int, store: Store, client: redis.Redis) -> None:
    store.partition_size = size
    dues = orders()[order]
    for n in range(0, len(dues), 20):
        store.schedule("q", [entry(str(n + i), due) for i, due in enumerate(dues[n : n + 20])])
        check_dues(client, dues[: n + 20])
    for own in due_times(client):
        assert len(own) < size or len(set(own)) == 1


def test_big_run_moves_in_pieces(client: redis.Redis) -> None:
    """After a change of the partition size more may have to move than one command takes."""
    Store(client, partition_size=100_000, now="1000").schedule(
        "q", [entry(str(n), 2000 + n) for n in range(5000)]
    )
    Store(client, partition_size=100, now="1000").schedule("q", [entry("x", 3000)])
    assert list(map(len, due_times(client))) == [2500, 2501]
    check_dues(client, [*range(2000, 7000), 3000])


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
