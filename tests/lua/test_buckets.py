"""Hashes that grow with a queue are spread over buckets, so that no key becomes too large."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from celery_ext.http.dialects.claims import new_name
from kombu_delayed.inspection.backlog import Backlog, Move
from kombu_delayed.store import store as store_module
from kombu_delayed.store.store import Entry, Size, Store
from tests.kit.backlog import check_backlog, records
from tests.kit.claims import deliver
from tests.kit.state import all_keys, entry, message

BYTES = 20_000
BODY = "x" * 400
KEY = "{q}:messages"


@pytest.fixture
def store(store: Store) -> Store:
    store.bucket_bytes = BYTES
    return store


def entries(count: int, first: int = 0) -> list[Entry]:
    numbers = range(first, first + count)
    return [entry(f"m{n}", 2000 + n, body=f"{n}-{BODY}") for n in numbers]


def buckets(client: redis.Redis, key: str = KEY) -> list[int]:
    """The number of bytes in each bucket."""
    return [
        sum(len(id) + len(record) for id, record in client.hgetall(name).items())
        for name in (key, *(each for each in all_keys(client) if each.startswith(f"{key}:")))
        if client.type(name) == b"hash"
    ]


def test_no_key_becomes_large(store: Store, client: redis.Redis) -> None:
    for n in range(3000 // 60):
        store.schedule("q", entries(60, 60 * n))
    sizes = buckets(client)
    assert max(sizes) < 3 * BYTES
    assert len(sizes) < 16 * sum(sizes) / BYTES
    assert len(check_backlog(client)) == 3000 == store.delayed_count("q")


def test_a_large_queue_is_counted_in_parts(
    store: Store, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "COUNT_LIMIT", 5)
    store.partition_size = 10
    store.schedule("q", entries(500))
    client.lpush("q", message("ready"))
    store.now = "2200"
    assert client.zcount("{q}:partitions", "-inf", 2200) > 10
    assert len(buckets(client)) > 10

    def counted(command: str, with_delayed: bool = True) -> tuple[Size, int, float]:
        client.config_resetstat()
        size, stats = store.size("q", with_delayed=with_delayed), client.info("commandstats")
        calls = stats["cmdstat_evalsha"]["calls"]
        return size, calls, stats.get(f"cmdstat_{command}", {"calls": 0})["calls"] / calls

    assert store.size("q") == Size(1, 201, 500)
    for command in ("hlen", "zcount"):
        size, calls, each = counted(command)
        assert (size, calls > 2, each <= 6) == (Size(1, 201, 500), True, True)
    size, calls, each = counted("hlen", with_delayed=False)
    assert (size, calls > 2, each) == (Size(1, 201, 0), True, 0)
    assert store.delayed_count("q") == 500


def test_a_message_is_found_by_its_id(store: Store, client: redis.Redis) -> None:
    store.schedule("q", entries(500))
    assert len(buckets(client)) > 5
    backlog = Backlog(store, "q")
    assert store.schedule("q", entries(500)).already == 500
    assert [each.member for each in backlog.get("m77")] == ["m77"]
    assert backlog.cancel(["m77", "m77", "no"]) == [1, 0, 0]
    assert backlog.reschedule([Move("m78", "9000")]) == [1]
    (moved,) = backlog.get("m78")
    assert (moved.kept.due_ms, moved.kept.message) == (9000, message(f"78-{BODY}").encode())
    assert len(check_backlog(client)) == 499


def test_messages_are_deleted_without_being_read(store: Store, client: redis.Redis) -> None:
    store.schedule("q", entries(500))
    client.config_resetstat()
    assert store.purge("q") == 500
    called: Any = client.info("commandstats")
    assert called["cmdstat_hdel"]["calls"] < 1000  # not once in each generation
    assert {"cmdstat_hget", "cmdstat_hmget"}.isdisjoint(called)


@pytest.mark.parametrize("way", ["deliver", "cancel", "purge"])
def test_an_empty_queue_leaves_no_key(store: Store, client: redis.Redis, way: str) -> None:
    store.schedule("q", entries(500))
    if way == "deliver":
        store.now = "10000"
        got = [deliver(store, "A-1000", 100, tag).records for tag in range(0, 500, 100)]
        found = [record.partition(b"-")[0].rpartition(b'"')[2] for each in got for record in each]
        assert found == [b"%d" % n for n in range(500)]
    elif way == "cancel":
        assert sum(Backlog(store, "q").cancel([f"m{n}" for n in range(500)])) == 500
    else:
        assert store.purge("q") == 500
    assert not [key for key in all_keys(client) if key.startswith(KEY)]


def test_a_large_hash_of_an_older_format_is_moved_bit_by_bit(
    store: Store, client: redis.Redis
) -> None:
    store.bucket_bytes = 0
    store.schedule("q", entries(3000))
    assert client.hlen(KEY) == 3000
    store.bucket_bytes = BYTES
    store.schedule("q", entries(1, 3000))
    assert client.hlen(KEY) == 3001, "nothing is moved for it"
    assert Backlog(store, "q").cancel(["m5", "m2999", "m3000"]) == [1, 1, 1]
    assert store.schedule("q", entries(60)).already == 59, "also what has not been moved is found"
    assert Backlog(store, "q").cancel(["m5"]) == [1]
    cursor, calls = b"0", 0
    while calls == 0 or cursor != b"0":
        cursor = store.ask("spread_out", "q", hash=KEY, cursor=cursor, count=100)
        calls += 1
        assert len(records(client)) == 2998
    assert calls > 10
    assert max(buckets(client)) < 3 * BYTES
    assert len(check_backlog(client)) == 2998


@pytest.mark.parametrize("name", ["host-1-abc.0", f"http:12:{'5c' * 16}"])
def test_beside_workers_that_know_no_buckets(name: str, store: Store, client: redis.Redis) -> None:
    """Their names do not end with a lease length; messages they promote would be lost."""
    client.zadd("{q}:consumers", {name: 1})
    store.schedule("q", entries(500))
    assert len(buckets(client)) == 1
    client.zrem("{q}:consumers", name)
    store.schedule("q", entries(100, 500))
    assert len(buckets(client)) > 1


def test_programs_that_get_messages_over_http_know_buckets(
    store: Store, client: redis.Redis
) -> None:
    client.zadd("{q}:consumers", {new_name(): 1})
    store.schedule("q", entries(500))
    assert len(buckets(client)) > 1


def test_producers_that_know_no_buckets(store: Store, client: redis.Redis) -> None:
    """Messages they store in the old place for all messages are found like any other."""
    store.schedule("q", entries(500))
    store.bucket_bytes = 0
    client.set("was", client.get(f"{KEY}:buckets") or b"")
    client.delete(f"{KEY}:buckets")
    store.schedule("q", entries(60, 500))
    client.rename("was", f"{KEY}:buckets")
    assert Backlog(store, "q").cancel([f"m{n}" for n in range(500, 530)]) == [1] * 30
    store.now = "10000"
    got = [deliver(store, "A-1000", 100, tag).records for tag in range(0, 600, 100)]
    assert sum(map(len, got)) == 530
    assert not [key for key in all_keys(client) if key.startswith(KEY)]


@pytest.mark.parametrize("expires_ms", [0, 60_000])
def test_dead_letters(store: Store, client: redis.Redis, expires_ms: int) -> None:
    """They expire only with a queue that does."""
    store.publish("q", [entry(f"m{n}", body=f"{n}-{BODY}") for n in range(300)], expires_ms)
    held = deliver(store, "A-1000", 300, 1, expires_ms=expires_ms)
    tags = range(1, len(held.records) + 1)
    store.bury("q", "A-1000", [(tag, f"m{tag}", "no", b"") for tag in tags])
    names = [key for key in all_keys(client) if ":dead" in key]
    assert len(names) > 10
    assert {client.pttl(name) > 0 for name in names} == {expires_ms > 0}
    ids = store.dead.ids("q", 0, 1000)
    assert len(store.dead.letters("q", ids)) == 300
    assert store.dead.replay("q", ids[:100]) == 100
    assert store.dead.purge("q", ids[100:]) == 200
    assert not [key for key in all_keys(client) if ":dead" in key]


def test_one_large_message_does_not_spread_small_ones(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [*entries(20), entry("large", 2000, body="y" * 50 * BYTES)])
    assert len(buckets(client)) == 1
    assert message("y" * 50 * BYTES) in records(client)["large"]
