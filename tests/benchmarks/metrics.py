"""Whether what a control plane asks for again and again costs more with a larger backlog."""

from __future__ import annotations

from kombu_delayed.store.store import Entry, Store
from tests.benchmarks.backlog import TEMPLATE, timed
from tests.benchmarks.fill import store_of
from tests.benchmarks.report import NOTHING, Benchmark, Figures, Row
from tests.benchmarks.rig import Rig

SIZES = (1_000, 100_000, 1_000_000)
QUICK_SIZES = (100, 1_000, 20_000)
DAY_MS = 86_400_000
LIMIT_US = 2_000


def fill_day(store: Store, queue: str, count: int) -> None:
    """Messages that are evenly due within the coming day: all are in some count."""
    step_ms = DAY_MS / count
    for first in range(0, count, 1_000):
        numbers = range(first, min(first + 1_000, count))
        store.schedule(
            queue, [Entry(f"{n}", 0, TEMPLATE[1], f"{1_000 + n * step_ms:.0f}") for n in numbers]
        )


def measure(rig: Rig) -> Figures:
    store = store_of(rig)
    store.now = "1000"
    figures: Figures = {}
    for size in rig.scaled(SIZES, QUICK_SIZES):
        queue = f"of-{size}"
        fill_day(store, queue, size)
        us, _ = timed(rig, lambda _, queue=queue: store.metrics(queue))
        figures[f"{size:,}"] = us
    return figures


def rows(ours: Figures) -> list[Row]:
    *smaller, largest = ours
    return [
        Row(
            f"`metrics` of a queue with {', '.join(smaller)} and {largest} messages due within a "
            "day, in the server",
            f"≤ {LIMIT_US:,} µs",
            NOTHING,
            f"{', '.join(f'{us:,.0f}' for us in ours.values())} µs",
            f"{ours[largest] / ours[smaller[-1]]:.2f}",
            ours[largest] <= LIMIT_US,
        )
    ]


BENCHMARKS = [Benchmark("metrics", measure, rows, sides=("ours",), rounds=1)]
