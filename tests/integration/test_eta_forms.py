"""The ways in which Celery users say when: each is kept, with unchanged code."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import group

from tests.integration.test_celery import LATE_SECONDS, Bench, bench_of, lateness
from tests.kit.ledger import Ledger
from tests.kit.servers import start_server
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

pytestmark = pytest.mark.smoke


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench_of("threads", tmp_path_factory.mktemp("etas"), gossip=False) as bench:
        yield bench


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Kathmandu"])
def test_eta_in_a_zone_with_rules(bench: Bench, zone: str) -> None:
    at = datetime.now(timezone.utc) + timedelta(seconds=0.3)
    result = bench.send("record", eta=at.astimezone(ZoneInfo(zone)))
    bench.ledger.wait_for_all([result.id])
    (run,) = bench.ledger.of(result.id)
    assert 0 <= run["at"] - at.timestamp() < LATE_SECONDS


@pytest.mark.parametrize("config", [{"enable_utc": False}, {"timezone": "Asia/Tokyo"}])
def test_countdown_of_an_app_with_a_zone_of_its_own(bench: Bench, config: dict[str, Any]) -> None:
    settings = Settings(bench.settings.broker_url, config=config)
    result = make_app(settings).send_task("record", countdown=0.3)
    assert 0 <= lateness(bench, result) < LATE_SECONDS


def test_countdown_of_a_whole_group(bench: Bench) -> None:
    parts = [bench.signature("record", n) for n in range(4)]
    results = group(parts, app=bench.app).apply_async(countdown=0.4)
    assert all(0 <= lateness(bench, each) < LATE_SECONDS for each in results)


def test_link_with_countdown(bench: Bench) -> None:
    callback = bench.signature("record").set(countdown=0.3)
    done = bench.send("add", 1, 2, link=callback)
    assert done.get(timeout=60) == 3
    bench.ledger.wait(
        lambda all: any(run.get("args") == [3] for run in all), "the callback has run"
    )
    (run,) = [run for run in bench.ledger.entries() if run.get("args") == [3]]
    assert 0 <= run["at"] - datetime.fromisoformat(run["eta"]).timestamp() < LATE_SECONDS


def test_retry_with_an_eta(bench: Bench) -> None:
    at = datetime.now(timezone.utc) + timedelta(seconds=0.6)
    result = bench.send("retry_at", at.isoformat())
    result.get(timeout=60)
    first, second = bench.ledger.of(result.id)
    assert first["eta"] is None
    assert 0 <= second["at"] - at.timestamp() < LATE_SECONDS


def test_expires_as_a_time(bench: Bench) -> None:
    now = datetime.now(timezone.utc)
    early, late = now + timedelta(seconds=0.1), now + timedelta(seconds=60)
    gone = bench.send("record", countdown=0.3, expires=early)
    assert 0 <= lateness(bench, bench.send("record", countdown=0.3, expires=late)) < LATE_SECONDS
    wait_until(lambda: gone.state == "REVOKED", "it has expired")
    assert bench.ledger.of(gone.id) == []


def test_expiry_with_no_worker_running(tmp_path: Path) -> None:
    with bench_of("solo", tmp_path, gossip=False) as bench:
        bench.worker.stop()
        gone = bench.send("record", countdown=0.1, expires=0.2)
        kept = bench.send("record", countdown=0.3)
        due = datetime.now(timezone.utc) + timedelta(seconds=0.4)
        wait_until(lambda: datetime.now(timezone.utc) > due, "both are due")
        bench.worker.start()
        bench.ledger.wait_for_all([kept.id])
        wait_until(lambda: gone.state == "REVOKED", "it has expired")
        assert bench.ledger.ids() == [kept.id]


def test_a_worker_without_a_prefetch_limit(tmp_path: Path) -> None:
    config = {"worker_prefetch_multiplier": 0}
    with bench_of("threads", tmp_path, gossip=False, config=config) as bench:
        sent = [bench.send("record", countdown=0.1 * (n % 5)).id for n in range(100)]
        bench.ledger.wait_for_all(sent)
        assert max(bench.ledger.runs().values()) == 1


def test_worker_on_a_unix_socket(ledger: Ledger, tmp_path: Path) -> None:
    with start_server("valkey", tmp_path / "server") as server:
        settings = Settings(f"delayed+{server.url}", None, {}, str(ledger.path))
        with Worker(settings, tmp_path, pool="prefork"), make_app(settings) as app:
            ledger.wait_for_all([app.send_task("record", countdown=0.2).id])
