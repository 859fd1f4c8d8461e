"""How fast tasks are sent and run, and how late they start."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from time import perf_counter
from typing import Any

from tests.benchmarks.app import batch, create_app
from tests.benchmarks.report import Figures, Line, at_least, benchmark, percentile
from tests.benchmarks.rig import WARM_UP, Rig

DELAY_MS = 1
#: For the benchmark of lateness.
RATE, AHEAD_SECONDS = 100, (1.0, 10.0)
P50_MS, P99_MS = 3, 10

TASK_SECONDS = 0.02
WORKERS, SLOTS = 3, 2


def singly(url: str, count: int, *arguments: str) -> float:
    """Tasks per second, with one call of `apply_async` each."""
    work = create_app(url).tasks["work"]
    for _ in range(WARM_UP):
        work.apply_async(arguments, countdown=3600)
    began = perf_counter()
    for _ in range(count):
        work.apply_async(arguments, countdown=3600)
    return count / (perf_counter() - began)


def in_batch(url: str, count: int) -> float:
    """Tasks per second, in one `Producer.batch()`."""
    app = create_app(url)
    work = app.tasks["work"]
    work.apply_async(countdown=3600)
    began = perf_counter()
    with batch(app) as options:
        for _ in range(count):
            work.apply_async(countdown=3600, **options)
    return count / (perf_counter() - began)


@benchmark("publish", at_least("`apply_async(countdown=…)` from one process", 1.4), stock=True)
def publish(rig: Rig) -> Figures:
    return {"rate": rig.apart(singly, rig.url(), rig.scaled(8_000, 1_500))}


@benchmark("publish-batch", at_least("the same within `Producer.batch()`", 1.0), stock=True)
def publish_batch(rig: Rig) -> Figures:
    return {"rate": rig.apart(in_batch, rig.url(), rig.scaled(20_000, 4_000))}


def drain(rig: Rig, count: int, url: str) -> Figures:
    rig.send(((), {}) for _ in range(count))
    return {"rate": rig.drain(count, url=url)}


@benchmark(
    "throughput",
    at_least("tasks that do nothing through one worker (prefork, `-c 2`)", 2.0),
    stock=True,
)
def throughput(rig: Rig) -> Figures:
    return drain(rig, rig.scaled(10_000, 2_000), rig.url())


@benchmark(
    "throughput-delay", at_least("the same with 1 ms of network delay each way", 3.0), stock=True
)
def throughput_delay(rig: Rig) -> Figures:
    """Through a proxy in its own process."""
    target = f"127.0.0.1:{rig.server.port}"
    proxy = rig.start("tests.kit.proxy", "--to", target, "--delay-ms", str(DELAY_MS))
    assert proxy.stdout is not None
    port = int(proxy.stdout.readline().rpartition(b":")[2])
    return drain(rig, rig.scaled(4_000, 800), rig.url(port))


def send_steadily(
    url: str, count: int, rate: float, options: Callable[[random.Random, int], dict[str, Any]]
) -> None:
    """Each task is due after a countdown of its own, or at once."""
    work = create_app(url).tasks["work"]
    chance, began = random.Random(1), time.time()
    for number in range(count):
        time.sleep(max(began + number / rate - time.time(), 0))
        own = options(chance, number)
        work.apply_async((number, time.time() + own.get("countdown", 0)), **own)


def _ahead(chance: random.Random, number: int) -> dict[str, Any]:
    return {"countdown": chance.uniform(*AHEAD_SECONDS)}


@benchmark(
    "lateness",
    Line(
        f"lateness of start, {RATE} tasks/s with ETAs 1-10 s ahead: p50, p99 (max)",
        "{p50_ms:.1f}, {p99_ms:.1f} ({max_ms:.0f}) ms",
        f"p50 ≤ {P50_MS} ms, p99 ≤ {P99_MS} ms",
        lambda f: f"{f['p50_ms'] / f['stock_p50_ms']:.2f}, {f['p99_ms'] / f['stock_p99_ms']:.2f}",
        lambda f: f["p50_ms"] <= P50_MS and f["p99_ms"] <= P99_MS,
        "{stock_p50_ms:.1f}, {stock_p99_ms:.1f} ({stock_max_ms:.0f}) ms",
    ),
    stock=True,
)
def lateness(rig: Rig) -> Figures:
    count = rig.scaled(30, 5) * RATE
    rig.start_worker().await_ready()
    rig.apart(send_steadily, rig.url(), count, RATE, _ahead)
    rig.await_done(count, AHEAD_SECONDS[1] + 20)
    late_ms = [(start.at - start.due) * 1000 for start in rig.starts()]
    return {
        "p50_ms": percentile(late_ms, 0.5),
        "p99_ms": percentile(late_ms, 0.99),
        "max_ms": max(late_ms),
    }


# Many tasks that are due at one instant.


def due_at(due: float, count: int, seconds: float = 0.0) -> Iterator[tuple[Any, Any]]:
    """Tasks for `Rig.send`; 0: due at once."""
    eta = datetime.fromtimestamp(due, timezone.utc) if due else None
    return (((number, due, seconds), {"eta": eta}) for number in range(count))


@benchmark(
    "instant",
    Line(
        "{count:,.0f} tasks due at one instant, one worker: time to drain (as many immediate ones)",
        "{due_s:.1f} s ({immediate_s:.1f} s)",
        "no slower than immediate ones (± 5 %)",
        lambda f: (
            f"{f['due_s'] / f['stock_due_s']:.2f}; to immediate {f['due_s'] / f['immediate_s']:.2f}"
        ),
        lambda f: f["due_s"] / f["immediate_s"] <= 1.05,
        "{stock_due_s:.1f} s ({stock_immediate_s:.1f} s)",
    ),
    stock=True,
)
def instant(rig: Rig) -> Figures:
    """Seconds to drain tasks due at one instant, and as many that were due all along."""
    count = rig.scaled(10_000, 2_000)
    rig.send(due_at(0, count))
    first = rig.start_worker()
    rig.await_done(count, 60)
    starts = first.starts()
    first.kill()
    second = rig.start_worker().await_ready()
    due = time.time() + rig.scaled(25, 6)  # time for stock's worker to take them all
    rig.send(due_at(due, count))
    rig.await_done(count, due - time.time() + 60, [second])
    return {
        "count": count,
        "immediate_s": starts[-1].at - starts[0].at,
        "due_s": second.starts()[-1].at - due,
    }


def _loads(most: float, least: float) -> str:
    return f"{f'{most / least:.2f}' if least else '∞'} ({most:,.0f} to {least:,.0f})"


@benchmark(
    "spread",
    Line(
        "{count:,.0f} tasks of 20 ms due at one instant, 3 workers (`-c 2`) started one after the "
        "other: most ÷ least loaded",
        lambda f: _loads(f["most"], f["least"]),
        "≤ 1.1",
        reached=lambda f: f["least"] > 0 and f["most"] / f["least"] <= 1.1,
        stock=lambda f: _loads(f["stock_most"], f["stock_least"]),
    ),
    Line(
        "the same: makespan",
        "{makespan:.2f}",
        "≤ 1.15 × ideal",  # noqa: RUF001
        ("makespan", "stock_makespan"),
        lambda f: f["makespan"] <= 1.15,
        "{stock_makespan:.2f}",
    ),
    stock=True,
)
def spread(rig: Rig) -> Figures:
    """Load and time of workers that were started one after the other before the instant."""
    count = rig.scaled(3_000, 600)
    due = time.time() + rig.scaled(15, 10)
    rig.send(due_at(due, count, TASK_SECONDS))
    for _ in range(WORKERS):
        rig.start_worker().await_ready()
    if time.time() > due - 1:
        raise RuntimeError("the machine is too slow: the workers were not ready in time")
    rig.await_done(count, due - time.time() + 90)
    loads = [worker.count() for worker in rig.workers]
    ideal = count * TASK_SECONDS / (WORKERS * SLOTS)
    return {
        "count": count,
        "most": max(loads),
        "least": min(loads),
        "makespan": (rig.starts()[-1].at + TASK_SECONDS - due) / ideal,
    }
