"""How late a task starts, at a steady load."""

from __future__ import annotations

import random
import time

from tests.benchmarks.app import create_app
from tests.benchmarks.report import Benchmark, Figures, Row, percentile
from tests.benchmarks.rig import Rig

RATE = 100
AHEAD_SECONDS = (1.0, 10.0)
P50_MS, P99_MS = 3, 10


def publish(url: str, count: int) -> None:
    """Send tasks at a steady rate, each due some seconds later."""
    work = create_app(url).tasks["work"]
    chance = random.Random(1)
    began = time.time()
    for number in range(count):
        time.sleep(max(began + number / RATE - time.time(), 0))
        countdown = chance.uniform(*AHEAD_SECONDS)
        work.apply_async((number, time.time() + countdown), countdown=countdown)


def measure(rig: Rig) -> Figures:
    count = rig.scaled(30, 5) * RATE
    worker = rig.start_worker()
    worker.await_ready()
    rig.apart(publish, rig.url(), count)
    rig.await_done(count, AHEAD_SECONDS[1] + 20)
    late_ms = [(start.at - start.due) * 1000 for start in rig.starts()]
    return {
        "p50_ms": percentile(late_ms, 0.5),
        "p99_ms": percentile(late_ms, 0.99),
        "max_ms": max(late_ms),
    }


def rows(stock: Figures, ours: Figures) -> list[Row]:
    return [
        Row(
            f"lateness of start, {RATE} tasks/s with ETAs 1-10 s ahead: p50, p99 (max)",
            f"p50 ≤ {P50_MS} ms, p99 ≤ {P99_MS} ms",
            _text(stock),
            _text(ours),
            f"{ours['p50_ms'] / stock['p50_ms']:.2f}, {ours['p99_ms'] / stock['p99_ms']:.2f}",
            ours["p50_ms"] <= P50_MS and ours["p99_ms"] <= P99_MS,
        )
    ]


def _text(figures: Figures) -> str:
    return f"{figures['p50_ms']:.1f}, {figures['p99_ms']:.1f} ({figures['max_ms']:.0f}) ms"


BENCHMARKS = [Benchmark("lateness", measure, rows)]
