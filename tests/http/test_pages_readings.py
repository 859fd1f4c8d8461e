"""Data that pages read for all visitors: how often, and how far back."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from celery_ext.app.broker import Broker
from celery_ext.control.counts import ConsumerInfo
from celery_ext.http.pages.activity import PART_SECONDS, PARTS, ActivityReader
from celery_ext.http.pages.views.overview import NOTHING, Alarm, _of_consumer, _of_queue
from celery_ext.http.service.cache import Cache
from kombu_delayed.store.store import Store
from tests.kit.http import api_client, make_app
from tests.kit.servers import free_port


class Clock:
    """A clock for `time.monotonic`; each reading takes some of its time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.reads = 100.0, 0
        own_time = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr("celery_ext.http.service.cache.time", own_time)

    def read(self, seconds: float = 0.0) -> int:
        self.now += seconds
        self.reads += 1
        return self.reads


def test_a_reading_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, cache = Clock(monkeypatch), Cache()
    found = []
    for passed in (0.0, 0.9, 0.2, 0.9):
        clock.now += passed
        found.append(cache.get("a", 1.0, clock.read))
    assert found == [1, 1, 2, 2]
    cache.forget()
    assert cache.get("a", 1.0, clock.read) == 3


@pytest.mark.parametrize(("took", "kept"), [(2.0, 40.0), (180.0, 60.0)])
def test_what_takes_long_is_kept_for_a_minute_at_most(
    took: float, kept: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis may have stood still: new data must not be missing for an hour after that."""
    clock, cache = Clock(monkeypatch), Cache()
    found = []
    for passed in (0.0, kept - 1, 2.0):
        clock.now += passed
        found.append(cache.get("a", 1.0, lambda: clock.read(took)))
    assert found == [1, 1, 2]


def test_the_readings_of_a_thousand_queues_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The overview has three of each queue, and reads all of them every two seconds."""
    clock, cache = Clock(monkeypatch), Cache()
    for _ in range(2):
        for of in ("metrics", "consumers", "forecast"):
            for queue in range(1_000):
                cache.get((of, queue), 1.0, clock.read)
    assert clock.reads == 3_000


def test_threads_wait_for_one_reading() -> None:
    cache, begun, go, reads = Cache(), threading.Event(), threading.Event(), []

    def read() -> int:
        reads.append(1)
        begun.set()
        assert go.wait(10)
        return 7

    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(cache.get("a", 60.0, read))) for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    assert begun.wait(10)
    go.set()
    for thread in threads:
        thread.join(10)
    assert (found, len(reads)) == ([7] * 5, 1)


def tell(client: redis.Redis, kind: str, ago_seconds: float, late_ms: int | None = None) -> None:
    at_ms = int((NOW - ago_seconds) * 1000)
    due_ms = None if late_ms is None else at_ms - late_ms
    facts = [kind, "id", "work", "", due_ms, "w@h:1:a", 0]
    client.xadd("{q}:events", {"v": 2, "event": json.dumps(facts)}, id=str(at_ms))


#: The middle of one part of a minute.
NOW = 1_000_000_000 * PART_SECONDS + PART_SECONDS / 2


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery_ext.http.pages.activity.time", SimpleNamespace(time=lambda: NOW))


def test_a_pulse(client: redis.Redis, store: Store) -> None:
    for ago, late_ms in ((9_000, 90_000), (50, 100), (40, 300), (30, 200), (20, -50)):
        tell(client, "delivered", ago, late_ms)
    tell(client, "delivered", 19)
    tell(client, "acked", 18)
    tell(client, "acked", 1)
    found = ActivityReader().look(store, ["q"])
    assert (found.delivered, found.done) == (5, 1)
    assert (found.late_half, found.late_worst) == (0.2, 0.3)
    assert found.parts == [0] * (PARTS - 1) + [1]
    assert found.has_events
    assert not found.is_partial


@pytest.mark.parametrize(
    ("given", "levels"),
    [
        ({"delayed": 5}, []),
        ({"delayed": 5, "due": 1}, ["critical"]),
        ({"ready": 1, "consumers": 1}, []),
        ({"due": 1, "consumers": 1, "oldest_due_seconds": 59.0}, []),
        ({"due": 1, "consumers": 1, "oldest_due_seconds": 60.0}, ["warning"]),
        ({"due": 1, "consumers": 1, "oldest_due_seconds": 900.0}, ["critical"]),
        ({"due": 1, "consumers": 1, "waiting": 1, "oldest_waiting_seconds": 59.0}, []),
        ({"due": 1, "consumers": 1, "waiting": 1, "oldest_waiting_seconds": 60.0}, ["warning"]),
        ({"dead": 2}, ["note"]),
    ],
)
def test_alarms_of_a_queue(given: dict[str, Any], levels: list[str]) -> None:
    assert [each.level for each in _of_queue("q", replace(NOTHING, **given))] == levels


@pytest.mark.parametrize(
    ("lease", "unacked", "count"), [(1.0, 5, 0), (-1.0, 0, 0), (-1.0, 5, 1), (0.0, 5, 1)]
)
def test_alarms_of_a_consumer(lease: float, unacked: int, count: int) -> None:
    found: list[Alarm] = [*_of_consumer(ConsumerInfo("q", "w", lease, unacked))]
    assert len(found) == count


@pytest.mark.parametrize("path", ["/consumers", "/v1/tasks/a"])
def test_a_broker_that_is_down_is_waited_for_once(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, tried = Broker._connect, list[Broker]()

    def counted(broker: Broker) -> Any:
        tried.append(broker)
        return connect(broker)

    monkeypatch.setattr(Broker, "_connect", counted)
    with make_app(f"redis://127.0.0.1:{free_port()}/0") as app, api_client(app) as api:
        assert api.get(path).status_code == 503
    assert len(tried) == 1
