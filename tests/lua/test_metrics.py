from __future__ import annotations

import random
from dataclasses import replace

import pytest
import redis

from kombu_delayed.store import store as store_module
from kombu_delayed.store.queue_metrics import Metrics
from kombu_delayed.store.store import Store
from tests.kit.claims import deliver
from tests.kit.state import entry, seed, state

HOUR_MS = 3_600_000


@pytest.fixture(autouse=True)
def _small_partitions(store: Store) -> None:
    store.partition_size = 4


def fill(store: Store, count: int, spread_ms: int) -> list[int]:
    """Schedule messages due in the coming `spread_ms`; returns when."""
    chance = random.Random(1)
    due_times = [1001 + chance.randrange(spread_ms) for _ in range(count)]
    store.schedule("q", [entry(str(n), at_ms) for n, at_ms in enumerate(due_times)])
    return due_times


@pytest.mark.parametrize("now_ms", [1000, 1030, 40_000, HOUR_MS])
@pytest.mark.parametrize("spread_ms", [50, 100_000, 2 * HOUR_MS, 48 * HOUR_MS])
def test_counts_over_partitions(
    now_ms: int, spread_ms: int, store: Store, client: redis.Redis
) -> None:
    due_times = fill(store, 100, spread_ms)
    store.now = str(now_ms)
    before = state(client)
    found = store.metrics("q")
    assert state(client) == before
    later = [at_ms for at_ms in due_times if at_ms > now_ms]
    assert found.due == len(due_times) - len(later)
    assert found.due_within_minute == sum(at_ms <= now_ms + 60_000 for at_ms in later)
    assert found.due_within_hour == sum(at_ms <= now_ms + HOUR_MS for at_ms in later)
    assert found.due_within_day == sum(at_ms <= now_ms + 24 * HOUR_MS for at_ms in later)
    assert found.next_due_seconds == ((min(later) - now_ms) / 1000 if later else None)
    assert found.oldest_due_seconds == max(now_ms - min(due_times), 0) / 1000
    assert not found.is_estimate


NOTHING = Metrics(0, 0, 0, 0, 0, 0, 0.0, None, 0, 0, 0, False)


def test_counts_by_state(store: Store) -> None:
    assert store.metrics("q") == NOTHING
    store.publish("q", [entry(n) for n in "abcdef"])
    deliver(store, "A", want=3)
    deliver(store, "B", want=2, lease_ms=500)
    store.bury("q", "A", [(1, "dead", "why", b"")])
    counts = replace(NOTHING, ready=1, unacked=4, dead=1)
    assert store.metrics("q") == replace(counts, consumers=2)
    store.now = "1500"
    assert store.metrics("q") == replace(counts, consumers=1)
    store.now = "90000"
    assert store.metrics("q") == replace(counts, consumers=0)


def test_what_was_promoted_is_late_until_a_consumer_has_it(store: Store) -> None:
    store.schedule("q", [entry("a", 2_000), entry("b", 3_000), entry("c", 4_000)])
    store.schedule("q", [entry("d", 9_000, step=3)])
    store.now = "10000"
    assert store.metrics("q").oldest_due_seconds == 8.0
    deliver(store, want=1)
    found = store.metrics("q")  # b is in front of c
    assert (found.delayed, found.ready, found.oldest_due_seconds) == (0, 3, 7.0)
    deliver(store, want=2, tag=2)
    assert store.metrics("q").oldest_due_seconds == 1.0
    store.release("q", "A", [1], counted=True)
    assert store.metrics("q").oldest_due_seconds == 8.0
    deliver(store, tag=4)
    assert store.metrics("q").oldest_due_seconds == 0.0


def test_what_is_far_is_estimated(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "COUNT_LIMIT", 20)
    fill(store, 1_000, 2 * HOUR_MS)
    found = store.metrics("q")
    assert found.is_estimate
    assert found.due_within_day == found.delayed == 1_000
    assert found.due_within_hour == pytest.approx(500, rel=0.1)
    assert found.due_within_minute == pytest.approx(8, abs=6)


def test_a_large_number_of_messages_is_estimated(
    store: Store, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a limit, the messages in a part of the buckets are counted."""
    store.bucket_bytes, store.partition_size = 1_000, 128
    fill(store, 5_000, 2 * HOUR_MS)
    exact = store.metrics("q")
    assert (exact.delayed, exact.is_estimate) == (5_000, False)
    monkeypatch.setattr(store_module, "COUNT_LIMIT", 100)
    client.config_resetstat()
    found = store.metrics("q")
    assert found.is_estimate
    assert found.delayed == pytest.approx(5_000, rel=0.1)
    assert found.due_within_day == found.delayed
    assert client.info("commandstats")["cmdstat_hlen"]["calls"] < 300


def test_what_is_near_is_exact(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "COUNT_LIMIT", 20)
    due_times = fill(store, 1_000, 200 * HOUR_MS)
    store.now = str(sorted(due_times)[9])
    found = store.metrics("q")
    assert found.is_estimate
    assert found.due == 10
    ahead_ms = [at_ms - int(store.now) for at_ms in due_times]
    assert found.due_within_hour == sum(0 < ms <= HOUR_MS for ms in ahead_ms)


@pytest.mark.parametrize("head", ["", "x", '{"due_ms":', '{"due_ms":"9"}', '{"body": "due_ms"}'])
def test_heads_that_were_never_delayed(head: str, store: Store, client: redis.Redis) -> None:
    seed(client, {"q": [head]})
    assert store.metrics("q").oldest_due_seconds == 0
