"""Running tasks run once despite outages, steps of the server's clock and stuck loops."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from celery_ext.http.dialects import long_poll
from kombu_delayed.store.store import Store
from tests.kit.clock_steps import Clock, stepped_server
from tests.kit.ledger import Ledger
from tests.kit.proxy import Proxy
from tests.kit.servers import Server, available_kinds, start_server
from tests.kit.state import entry
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

pytestmark = [pytest.mark.thorough, pytest.mark.crash]

LEASE_SECONDS = 3.0
CONCURRENCY = 3
QUICK = {"worker_prefetch_multiplier": 1}


@pytest.fixture
def stepped(tmp_path: Path) -> Iterator[tuple[Server, Clock]]:
    with stepped_server(tmp_path / "server") as server_and_clock:
        yield server_and_clock


def settings(port: int | None, ledger: Ledger) -> Settings:
    options = {"delayed_lease_seconds": LEASE_SECONDS, "delayed_poll_seconds": 0.5}
    url = f"delayed+redis://127.0.0.1:{port}/0"
    return Settings(url, None, options, str(ledger.path), QUICK)


class Running:
    """Some workers, each with as many tasks as it can run at once."""

    def __init__(self, workers: list[Worker], ids: list[str], ledger: Ledger) -> None:
        self.workers = workers
        self.ids = ids
        self._ledger = ledger

    def phases(self, phase: str) -> list[str]:
        return [each["id"] for each in self._ledger.entries() if each.get("phase") == phase]

    def wait_for_the_end(self, server: Server) -> None:
        wait_until(lambda: len(self.phases("end")) >= len(self.ids), "all have ended", 120)
        with server.client() as client:
            wait_until(lambda: not client.keys("{celery}:unacked:*"), "all are acked", 60)
            assert client.llen("celery") == 0
        assert sorted(self.phases("start")) == sorted(self.ids)

    @property
    def lost_leases(self) -> list[str]:
        return [each.name for each in self.workers if "has ended and others get" in each.log]


def start(
    stack: ExitStack, setup: Settings, ledger: Ledger, directory: Path, count: int, seconds: float
) -> Running:
    workers = start_workers(stack, setup, directory, *(f"w{n}" for n in range(count)))
    app = make_app(setup)
    ids = [app.send_task("late", (seconds,)).id for _ in range(count * CONCURRENCY)]
    running = Running(workers, ids, ledger)
    wait_until(lambda: len(running.phases("start")) == len(ids), "all have begun", 60)
    return running


def start_workers(
    stack: ExitStack,
    setup: Settings,
    directory: Path,
    *names: str,
    pool: str = "threads",
    concurrency: int = CONCURRENCY,
) -> list[Worker]:
    workers = [
        Worker(setup, directory, name=name, pool=pool, concurrency=concurrency) for name in names
    ]
    for worker in workers:
        stack.callback(worker.kill)
        worker.start(wait=False)
    for worker in workers:
        worker.wait_until_ready()
    return workers


def test_an_outage_of_everybody(tmp_path: Path, ledger: Ledger) -> None:
    """It is longer than a lease: the first worker to be back takes nothing from the others."""
    kind = available_kinds()[0]
    with (
        start_server(kind, tmp_path / "server", port=0) as server,
        Proxy(server.port or 0) as proxy,
        ExitStack() as stack,
    ):
        setup = settings(proxy.port, ledger)
        running = start(stack, setup, ledger, tmp_path, 3, 4 * LEASE_SECONDS)
        proxy.cut()
        time.sleep(1.8 * LEASE_SECONDS)
        proxy.heal()
        running.wait_for_the_end(server)
        assert running.lost_leases == []


def test_the_clock_of_the_server_is_set(
    stepped: tuple[Server, Clock], tmp_path: Path, ledger: Ledger
) -> None:
    server, clock = stepped
    with ExitStack() as stack:
        setup = settings(server.port, ledger)
        running = start(stack, setup, ledger, tmp_path, 2, 3 * LEASE_SECONDS)
        clock.step(3600)
        running.wait_for_the_end(server)
        assert running.lost_leases == []


def test_what_a_dead_worker_held_runs_elsewhere(
    stepped: tuple[Server, Clock], tmp_path: Path, ledger: Ledger
) -> None:
    """This is so even if the server's clock is set back, so that its lease would last."""
    server, clock = stepped
    setup = settings(server.port, ledger)
    with ExitStack() as stack:
        running = start(stack, setup, ledger, tmp_path, 1, 3600)
        start_workers(stack, setup, tmp_path, "other")
        running.workers[0].kill()
        clock.step(-3600)
        again = sorted(running.ids * 2)
        wait_until(lambda: sorted(running.phases("start")) == again, "they run elsewhere", 60)


# Stuck loops.


@pytest.mark.parametrize(
    ("pool", "how"),
    [
        ("threads", "native"),
        ("solo", "python"),
        ("gevent", "python"),
        ("eventlet", "native"),
    ],
)
def test_a_task_that_does_not_yield_keeps_its_lease(
    server: Server, tmp_path: Path, ledger: Ledger, pool: str, how: str
) -> None:
    setup = settings(server.port, ledger)
    with ExitStack() as stack:
        workers = start_workers(stack, setup, tmp_path, "w1", "w2", pool=pool)
        ids = [make_app(setup).send_task("busy", (3 * LEASE_SECONDS, how)).id]
        running = Running(workers, ids, ledger)
        running.wait_for_the_end(server)
        assert running.lost_leases == []


def test_others_get_what_a_stuck_worker_has_not_begun(
    server: Server, client: redis.Redis, tmp_path: Path, ledger: Ledger
) -> None:
    setup = replace(settings(server.port, ledger), config={"worker_prefetch_multiplier": 4})
    app = make_app(setup)
    long = app.send_task("busy", (8 * LEASE_SECONDS, "python")).id
    ids = [app.send_task("late", (0,)).id for _ in range(3)]
    with ExitStack() as stack:
        start_workers(stack, setup, tmp_path, "stuck", pool="gevent", concurrency=1)
        wait_until(lambda: ledger.of(long), "it has begun", 60)
        assert [client.hlen(key) for key in client.keys("{celery}:unacked:*")] == [4]
        start_workers(stack, setup, tmp_path, "other", concurrency=1)
        Running([], [long, *ids], ledger).wait_for_the_end(server)
    assert {run["worker"] for id in ids for run in ledger.of(id)} == {"other@test"}
    assert {run["worker"] for run in ledger.of(long)} == {"stuck@test"}


# Programs that pull tasks over HTTP reclaim, too.


NEW, OLD = "w:1:0123abcd-30000", "w:1:0123abcd"  # version 0.1.0 names no length


class Pulling:
    """A worker's lease has expired by the server's clock, and a program pulls now and then."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch, worker: str) -> None:
        monkeypatch.setattr(long_poll, "monotonic", lambda: self.at)
        monkeypatch.setattr(long_poll, "_ended", {})
        self.store, self.at, self.ahead = store, 1000.0, 0.0
        store.now = "1000"
        store.publish("q", [entry("a"), entry("b")])
        for name in (worker, "http:1:" + "a" * 32):
            store.deliver("q", name, 1, 1, lease_ms=30_000)
        self.ahead = 2600.0
        self.pull(0)
        assert [name for name, _, _ in store.leases.consumers("q")] == [worker]

    def pull(self, after_seconds: float) -> bool:
        """Returns whether it has taken over."""
        self.at += after_seconds
        self.store.now = str(int((self.at + self.ahead) * 1000))
        long_poll._reclaim(self.store, "q")
        return not self.store.leases.consumers("q")


@pytest.mark.parametrize(
    ("worker", "pause_seconds", "takes_over"),
    [
        (NEW, 10, [False, False, True]),
        (OLD, 10, [False, False, True]),
        (NEW, 20, [False, True]),
        (NEW, 3600, [False, True]),  # the server may have been out of reach for all
    ],
)
def test_who_pulls_over_http_takes_nothing_from_workers_by_the_clock(
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    worker: str,
    pause_seconds: float,
    takes_over: list[bool],
) -> None:
    pulling = Pulling(store, monkeypatch, worker)
    assert [pulling.pull(pause_seconds) for _ in takes_over] == takes_over
    assert store.size("q").ready == 2


def test_who_pulls_over_http_forgets_workers_whose_messages_others_have_taken_over(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulling = Pulling(store, monkeypatch, NEW)
    assert [worker for _, worker in long_poll._ended] == [NEW]
    store.leases.reclaim("q", NEW)
    assert pulling.pull(10)
    assert not long_poll._ended


def test_who_pulls_over_http_begins_anew_when_the_clock_is_set(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulling = Pulling(store, monkeypatch, NEW)
    pulling.pull(15)
    pulling.ahead += 60
    assert [pulling.pull(15) for _ in range(3)] == [False, False, True]
