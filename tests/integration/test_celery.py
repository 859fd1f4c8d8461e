"""Real Celery workers on this transport, in every pool."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import celery
import pytest
import redis
from celery import Celery, chain, chord, group
from celery.exceptions import Reject
from celery.result import AsyncResult

from tests.kit.backlog import records
from tests.kit.ledger import Ledger
from tests.kit.servers import Server, available_kinds, start_server
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

pytestmark = [pytest.mark.thorough, pytest.mark.smoke]

POOLS = {"prefork": 2, "threads": 2, "solo": 1, "gevent": 10, "eventlet": 10}
KIND = available_kinds()[0]
#: How late a task may be on a busy machine. Workers poll less often than that.
LATE_SECONDS = 2
POLL_SECONDS = 60


@dataclass
class Bench:
    """A server with one worker on it, shared by the tests of one pool."""

    server: Server
    worker: Worker
    app: Celery
    settings: Settings
    ledger: Ledger
    directory: Path

    def send(self, name: str, *args: Any, **options: Any) -> AsyncResult:
        return self.app.send_task(name, args, **options)

    def signature(self, name: str, *args: Any, **options: Any) -> Any:
        return self.app.signature(name, args=args, **options)

    def client(self) -> redis.Redis:
        return self.server.client()


@contextlib.contextmanager
def bench_of(pool: str, directory: Path, **worker: Any) -> Iterator[Bench]:
    with start_server(KIND, directory / "server", port=0) as server:
        ledger = Ledger(directory / "ledger")
        results = f"redis://127.0.0.1:{server.port}/1"
        config = {"worker_enable_remote_control": True, **worker.pop("config", {})}
        transport = {"delayed_poll_seconds": POLL_SECONDS}
        settings = Settings(f"delayed+{server.url}", results, transport, str(ledger.path), config)
        options = {"pool": pool, "concurrency": POOLS[pool], "gossip": True, **worker}
        with Worker(settings, directory, **options) as process, make_app(settings) as app:
            yield Bench(server, process, app, settings, ledger, directory)
        gc.collect()  # results contact their server when they are collected: do it now


@pytest.fixture(scope="module", params=list(POOLS))
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    with bench_of(request.param, tmp_path_factory.mktemp(request.param)) as bench:
        yield bench


@pytest.fixture(scope="module")
def threads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """For tests that do not depend on the pool."""
    with bench_of("threads", tmp_path_factory.mktemp("any")) as bench:
        yield bench


@pytest.fixture
def solo(tmp_path: Path) -> Iterator[Bench]:
    """A separate bench for one test."""
    with bench_of("solo", tmp_path) as bench:
        yield bench


def lateness(bench: Bench, result: AsyncResult) -> float:
    """Seconds between the ETA that the task saw and its run."""
    # Not by result.get: that of Celery 5.5 takes a second each.
    bench.ledger.wait_for_all([result.id])
    (run,) = bench.ledger.of(result.id)
    return float(run["at"]) - datetime.fromisoformat(run["eta"]).timestamp()


def test_countdown(bench: Bench) -> None:
    result = bench.send("record", countdown=0.3)
    assert 0 <= lateness(bench, result) < LATE_SECONDS
    assert result.get(timeout=60) == bench.ledger.of(result.id)[0]["eta"]
    assert bench.send("record").get(timeout=60) is None


def test_eta(threads: Bench) -> None:
    at = datetime.now(timezone.utc) + timedelta(seconds=0.3)
    zones = timezone(timedelta(hours=-7)), ZoneInfo("Asia/Kathmandu")
    etas = [at, at.replace(tzinfo=None), *(at.astimezone(zone) for zone in zones)]
    forms: list[Any] = [*etas, *(eta.isoformat() for eta in etas)]
    ids = [threads.send("record", eta=eta).id for eta in forms]
    threads.ledger.wait_for_all(ids)
    for id in ids:
        (run,) = threads.ledger.of(id)
        assert 0 <= run["at"] - at.timestamp() < LATE_SECONDS
        seen = datetime.fromisoformat(run["eta"])
        assert (seen if seen.tzinfo else seen.replace(tzinfo=timezone.utc)) == at


def test_retry_with_countdown(threads: Bench) -> None:
    result = threads.send("retry", 0.3, 2)
    eta = result.get(timeout=60)
    runs = threads.ledger.of(result.id)
    assert [run["retries"] for run in runs] == [0, 1, 2]
    assert [run["eta"] is None for run in runs] == [True, False, False]
    assert runs[2]["eta"] == eta
    gaps = [b["at"] - a["at"] for a, b in itertools.pairwise(runs)]
    assert all(0.29 <= gap < 0.3 + LATE_SECONDS for gap in gaps)


def test_countdown_of_an_app_with_a_zone_and_of_a_whole_group(threads: Bench) -> None:
    parts = [threads.signature("record", n) for n in range(4)]
    results = [*group(parts, app=threads.app).apply_async(countdown=0.4)]
    for config in ({"enable_utc": False}, {"timezone": "Asia/Tokyo"}):
        with make_app(Settings(threads.settings.broker_url, config=config)) as app:
            results.append(app.send_task("record", countdown=0.3))
    for result in results:
        assert 0 <= lateness(threads, result) < LATE_SECONDS


def test_canvases(threads: Bench) -> None:
    steps = [threads.signature("add", 1, 1), threads.signature("add", 10).set(countdown=0.3)]
    steps.append(threads.signature("add", 100))
    result = chain(*steps, app=threads.app).apply_async(countdown=0.2)
    assert result.get(timeout=60) == 112
    header = [threads.signature("add", n, n).set(countdown=0.1 * n) for n in range(5)]
    body = threads.signature("total").set(countdown=0.2)
    assert chord(header, body, app=threads.app).apply_async().get(timeout=60) == 20
    threads.send("add", 10, 20, link=threads.signature("record").set(countdown=0.3))
    linked = threads.ledger.wait(
        lambda all: [run for run in all if run.get("args") == [30]], "the callback has run"
    )
    (run,) = [run for run in linked if run.get("args") == [30]]
    assert 0 <= run["at"] - datetime.fromisoformat(run["eta"]).timestamp() < LATE_SECONDS


def test_expires(threads: Bench) -> None:
    now = datetime.now(timezone.utc)
    early, late = now + timedelta(seconds=0.1), now + timedelta(seconds=60)
    gone = threads.send("record", countdown=0.3, expires=early)
    kept = threads.send("record", countdown=0.3, expires=late)
    assert 0 <= lateness(threads, kept) < LATE_SECONDS
    wait_until(lambda: gone.state == "REVOKED", "it has expired")
    assert threads.ledger.of(gone.id) == []


def test_a_backlog_is_not_held_by_workers(bench: Bench) -> None:
    bench.send("noop").get(timeout=60)
    before = bench.worker.rss_bytes()
    padding = "x" * 10_000
    results = [bench.send("record", padding, countdown=3600) for _ in range(200)]
    bench.send("noop").get(timeout=60)
    inspect = bench.app.control.inspect([bench.worker.name], timeout=30)
    assert inspect.scheduled() == {bench.worker.name: []}
    assert inspect.reserved() == {bench.worker.name: []}
    assert bench.worker.rss_bytes() - before < 1_000_000
    assert inspect.stats()[bench.worker.name]["prefetch_count"] <= 4 * max(POOLS.values())
    with bench.client() as client:
        assert len(records(client, "celery")) == 200
        wait_until(lambda: not client.keys("{celery}:unacked*"), "what has run is acked")
    assert bench.app.control.purge() == 200
    assert {result.state for result in results} == {"PENDING"}


def test_a_backlog_outlives_its_workers(solo: Bench) -> None:
    later = [solo.send("record", countdown=3600).id for _ in range(20)]
    soon = [solo.send("record", countdown=1.5).id for _ in range(5)]
    assert solo.worker.stop() == 0
    with solo.client() as client:
        assert client.hlen("{celery}:messages") == 25
        with Worker(solo.settings, solo.directory, name="next", pool="threads"):
            solo.ledger.wait_for_all(soon)
        assert client.hlen("{celery}:messages") == 20
    assert not set(later) & set(solo.ledger.ids())
    assert {run["worker"] for run in solo.ledger.entries()} == {"next@test"}
    solo.worker.start()


def test_reject_in_a_task(bench: Bench) -> None:
    buried = bench.send("reject").id
    again = bench.send("reject", True).id
    with bench.client() as client:
        wait_until(lambda: client.zcard("{celery}:dead") == 2, "both are dead")
        client.delete("{celery}:dead", "{celery}:dead-messages", "{celery}:dead-reasons")
    assert len(bench.ledger.of(buried)) == 1
    assert [run["redelivered"] for run in bench.ledger.of(again)] == [False, True]


@pytest.mark.parametrize("error", ["gone", "too few replicas"])
def test_a_task_whose_retry_cannot_be_sent_returns_to_its_queue(error: str, bench: Bench) -> None:
    sent = bench.send("retry_unsent", error).id
    bench.ledger.wait(lambda all: sum(e["id"] == sent for e in all) == 2, "it has run again")
    assert [run["redelivered"] for run in bench.ledger.of(sent)] == [False, True]
    with bench.client() as client:
        assert not client.exists("{celery}:dead")


@pytest.mark.skipif(celery.VERSION < (5, 7), reason="older Celery stores nothing for a Reject")
def test_a_task_that_is_acked_fails_if_its_retry_cannot_be_sent(threads: Bench) -> None:
    """Same as with stock Celery: otherwise the failure would go unnoticed."""
    with pytest.raises(Reject):
        threads.send("retry_unsent_early").get(timeout=60)


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_task_that_runs_out_of_memory_has_failed(pool: str, tmp_path: Path) -> None:
    """Celery alone does not ack it: it would stop each worker with processes, one after another."""
    with bench_of(pool, tmp_path) as bench, bench.client() as client:
        with pytest.raises(MemoryError):
            bench.send("out_of_memory").get(timeout=60)
        wait_until(lambda: not client.keys("{celery}:unacked:*"), "the worker keeps nothing")
        assert not client.exists("celery", "{celery}:dead")


def test_a_task_sends_a_task(bench: Bench) -> None:
    bench.send("send_from_task", "child-1", 0.2).get(timeout=60)
    bench.ledger.wait_for_all(["child-1"])


@pytest.mark.skipif(celery.VERSION < (5, 6), reason="new in Celery 5.6")
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_disabled_prefetch(tmp_path: Path, pool: str) -> None:
    config = {"worker_disable_prefetch": True}
    with bench_of(pool, tmp_path, config=config, concurrency=2) as bench:
        may_end = tmp_path / "may-end"
        for _ in range(4):
            bench.send("until", str(may_end), countdown=0.1)
        bench.ledger.wait_for(2)
        with bench.client() as client:
            held = sum(client.hlen(key) for key in client.keys("{celery}:unacked:*"))
            assert held == 0
            assert client.llen("celery") + client.hlen("{celery}:messages") == 2
        may_end.touch()
        bench.ledger.wait_for(4)


def test_a_worker_without_a_prefetch_limit(tmp_path: Path) -> None:
    with bench_of("threads", tmp_path, config={"worker_prefetch_multiplier": 0}) as bench:
        sent = [bench.send("record", countdown=0.1 * (n % 5)).id for n in range(100)]
        bench.ledger.wait_for_all(sent)
        assert max(bench.ledger.runs().values()) == 1


def test_worker_on_a_unix_socket(ledger: Ledger, tmp_path: Path) -> None:
    with start_server(KIND, tmp_path / "server") as server:
        settings = Settings(f"delayed+{server.url}", None, {}, str(ledger.path))
        with Worker(settings, tmp_path, pool="prefork"), make_app(settings) as app:
            ledger.wait_for_all([app.send_task("record", countdown=0.2).id])


@pytest.mark.thorough
@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_no_more_connections_than_a_stock_worker(
    own_server: Server, tmp_path: Path, pool: str
) -> None:
    """Counted after it has run a task and answered, when each part has opened its connections."""
    counts = {}
    for scheme in ("", "delayed+"):
        ledger = Ledger(tmp_path / f"{scheme}ledger")
        settings = Settings(f"{scheme}{own_server.url}", None, {}, str(ledger.path))
        with (
            Worker(settings, tmp_path, pool=pool, concurrency=2) as worker,
            make_app(settings) as app,
        ):
            ledger.wait_for_all([app.send_task("record").id])
            wait_until(partial(app.control.ping, [worker.name], timeout=1), "it answers")
            counts[scheme] = connections(worker.pid, own_server.port)
    assert 0 < counts["delayed+"] <= counts[""]


def connections(pid: int, port: int) -> int:
    """Connections of a process to a port of this machine."""
    opened = {link.readlink().name for link in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[2].endswith(f":{port:04X}") and f"socket:[{row[9]}]" in opened for row in rows)
