"""Many tasks that are due at one instant."""

from __future__ import annotations

import time
from datetime import datetime, timezone

from tests.benchmarks.app import batch
from tests.benchmarks.report import Benchmark, Figures, Row
from tests.benchmarks.rig import Rig

TASK_SECONDS = 0.02
WORKERS, SLOTS = 3, 2
#: How much slower than immediate ones still counts as no slower.
NOISE = 0.05


def publish(rig: Rig, count: int, due: float = 0.0, seconds: float = 0.0) -> None:
    """Send tasks that are due at one time, or at once."""
    eta = datetime.fromtimestamp(due, timezone.utc) if due else None
    with batch(rig.app) as options:
        for number in range(count):
            rig.app.tasks["work"].apply_async((number, due, seconds), eta=eta, **options)


def measure_instant(rig: Rig) -> Figures:
    """Seconds to drain tasks that are due at once, and as many that were due all along."""
    count = rig.scaled(10_000, 2_000)
    publish(rig, count)
    first = rig.start_worker()
    rig.await_done(count, 60)
    starts = first.starts()
    first.kill()
    second = rig.start_worker()
    second.await_ready()
    due = time.time() + rig.scaled(25, 6)  # time for stock's worker to take them all
    publish(rig, count, due)
    rig.await_done(count, due - time.time() + 60, [second])
    return {
        "count": count,
        "immediate_s": starts[-1].at - starts[0].at,
        "due_s": second.starts()[-1].at - due,
    }


def instant_rows(stock: Figures, ours: Figures) -> list[Row]:
    ratio = ours["due_s"] / ours["immediate_s"]
    return [
        Row(
            f"{ours['count']:,.0f} tasks due at one instant, one worker: time to drain "
            "(as many immediate ones)",
            "no slower than immediate ones (± 5 %)",
            f"{stock['due_s']:.1f} s ({stock['immediate_s']:.1f} s)",
            f"{ours['due_s']:.1f} s ({ours['immediate_s']:.1f} s)",
            f"{ours['due_s'] / stock['due_s']:.2f}; to immediate {ratio:.2f}",
            ratio <= 1 + NOISE,
        )
    ]


def measure_spread(rig: Rig) -> Figures:
    """Load and time of workers that were started one after the other before the instant."""
    count = rig.scaled(3_000, 600)
    due = time.time() + rig.scaled(15, 10)
    publish(rig, count, due, TASK_SECONDS)
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


def spread_rows(stock: Figures, ours: Figures) -> list[Row]:
    return [
        Row(
            f"{ours['count']:,.0f} tasks of 20 ms due at one instant, 3 workers (`-c 2`) started "
            "one after the other: most ÷ least loaded",
            "≤ 1.1",
            _loads(stock),
            _loads(ours),
            reached=ours["least"] > 0 and ours["most"] / ours["least"] <= 1.1,
        ),
        Row(
            "the same: makespan",
            "≤ 1.15 × ideal",  # noqa: RUF001
            f"{stock['makespan']:.2f}",
            f"{ours['makespan']:.2f}",
            f"{ours['makespan'] / stock['makespan']:.2f}",
            ours["makespan"] <= 1.15,
        ),
    ]


def _loads(figures: Figures) -> str:
    most, least = figures["most"], figures["least"]
    quotient = f"{most / least:.2f}" if least else "∞"
    return f"{quotient} ({most:,.0f} to {least:,.0f})"


BENCHMARKS = [
    Benchmark("instant", measure_instant, instant_rows),
    Benchmark("spread", measure_spread, spread_rows),
]
