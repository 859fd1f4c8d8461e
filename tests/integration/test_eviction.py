"""A server that evicts what has an expiry keeps all that counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import redis

from celery_ext.http.api.create_once import OnceStore
from celery_ext.spark.options import RESCHEDULE, RESTORE, SCHEDULE
from celery_ext.spark.sink.job_ledger import Job, LedgerStore
from kombu_delayed.store.keys import QueueKeys
from kombu_delayed.store.store import Entry, Scheduled, Store
from tests.kit.servers import available_kinds, start_server
from tests.kit.state import entry

LETTERS = 50


@pytest.fixture(params=["volatile-lru", "volatile-ttl"])
def full(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[redis.Redis]:
    config = {"maxmemory-policy": request.param}
    kind = available_kinds()[0]
    with (
        start_server(kind, tmp_path, port=0, config=config) as server,
        server.client() as client,
    ):
        yield client


def fill(client: redis.Redis) -> None:
    """Until the server is full and has nothing left that it may evict."""
    client.config_set("maxmemory", client.info("memory")["used_memory"] + 2_000_000)
    with suppress(redis.exceptions.OutOfMemoryError):
        for n in range(100_000):
            client.set(f"others:{n}", "x" * 1_000)
        pytest.fail("the server has room for all")


def bury(store: Store, start: int, count: int) -> None:
    letters = [(n, f"d{n}", "rejected", b'0{"n":1}') for n in range(start, start + count)]
    assert store.bury("q", "A", letters) == count


def with_an_expiry(client: redis.Redis) -> set[bytes]:
    return {key for key in client.keys("*") if client.pttl(key) != -1}


def test_nothing_that_counts_is_evicted(full: redis.Redis) -> None:
    store = Store(full, event_limit=100)
    bury(store, 0, LETTERS)
    store.publish("q", [entry("ready"), entry("held")])
    store.deliver("q", "A", 1, 1, lease_ms=30_000)
    store.schedule("q", [entry("later", 9_999_999_999_999)])
    assert store.schedule_unique("q", entry("u", 9_999_999_999_999), "key", "refuse")[0] == "stored"
    store.ask("latest", "q", key="key", due_ms=5)
    before = {key for key in full.keys("*") if not key.endswith((b":events", b":moved"))}
    assert with_an_expiry(full) <= {b"{q}:events", b"{q}:moved"}
    fill(full)
    assert before <= set(full.keys("*"))
    assert store.dead.count("q") == LETTERS
    full.config_set("maxmemory", 0)
    assert (
        store.schedule_unique("q", entry("v", 9_999_999_999_999), "key", "refuse")[0] == "refused"
    )


def due(*ids: str) -> list[Entry]:
    return [entry(id, 1) for id in ids]


def restore(store: LedgerStore) -> bytes:
    move, given = store.restore_call("q", [(b"c", b"01{}")])
    return bytes(move(store.run, **given))


def reschedule(store: LedgerStore) -> bytes:
    move, given = store.reschedule_call("q", [("later", "+1000000", "")])
    return bytes(move(store.run, **given))


def test_what_was_done_once_is_not_done_again(full: redis.Redis) -> None:
    store = Store(full)
    store.schedule("q", [entry("later", 9_999_999_999_999)])
    http = OnceStore(store, "id", "tenant", 60)
    jobs = [LedgerStore(store, Job("j", "run", 60, kind)) for kind in (SCHEDULE, RESTORE)]
    moves = LedgerStore(store, Job("j", "run", 60, RESCHEDULE))
    assert http.schedule("q", due("id")) == Scheduled(0, 1, 0)
    assert jobs[0].schedule("q", due("a", "b")) == Scheduled(0, 2, 0)
    assert (restore(jobs[1]), reschedule(moves)) == (b"1 0", b"1")
    assert jobs[0].shards.count("q") == 1
    assert with_an_expiry(full) <= {b"{q}:moved"}
    fill(full)
    full.config_set("maxmemory", 0)
    assert http.schedule("q", due("id")) == Scheduled(0, 0, 1)
    assert jobs[0].schedule("q", due("a", "b", "c")) == Scheduled(0, 1, 2)
    assert (restore(jobs[1]), reschedule(moves)) == (b"0 1", b"0")
    spread = Store(full, shards=3)
    assert LedgerStore(spread, jobs[0].job).shards.count("q") == 1


def test_what_older_code_has_let_expire_lasts_when_it_is_touched(client: redis.Redis) -> None:
    store, keys = Store(client), QueueKeys("q")
    bury(store, 0, 1)
    store.schedule_unique("q", entry("u", 9_999_999_999_999), "key", "refuse")
    kept = (keys.dead, keys.dead_messages, keys.dead_reasons, keys.unique, keys.unique_due)
    for key in kept:
        assert client.pexpire(key, 60_000)
    bury(store, 1, 1)
    store.schedule_unique("q", entry("v", 9_999_999_999_999), "other", "refuse")
    assert [client.pttl(key) for key in kept] == [-1] * len(kept)
