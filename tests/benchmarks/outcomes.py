"""What it costs a worker to record the outcomes of its tasks."""

from __future__ import annotations

import statistics

from tests.benchmarks.app import EXTENDED
from tests.benchmarks.report import Figures, Line, benchmark
from tests.benchmarks.rig import Rig

#: Of the throughput of a worker that records nothing.
COST = 0.03


def _drain(rig: Rig, count: int, extended: str) -> float:
    rig.redis.flushall()
    rig.send(((), {}) for _ in range(count))
    return rig.drain(count, environment={EXTENDED: extended})


@benchmark(
    "outcomes",
    Line(
        "tasks that do nothing through one worker (prefork, `-c 2`) that records their outcomes "
        "(that records none)",
        "{rate:,.0f}/s ({silent_rate:,.0f}/s)",
        f"≥ {1 - COST:.2f} × a worker that records none",  # noqa: RUF001
        ("rate", "silent_rate"),
        lambda f: f["rate"] / f["silent_rate"] >= 1 - COST,
    ),
)
def outcomes(rig: Rig) -> Figures:
    """Each with and without in turn, as the machine's speed drifts; the medians of five."""
    count = rig.scaled(10_000, 2_000)
    found: dict[str, list[float]] = {"yes": [], "silent": []}
    for _ in range(rig.scaled(5, 1)):
        for extended, rates in found.items():
            rates.append(_drain(rig, count, extended))
    return {
        "rate": statistics.median(found["yes"]),
        "silent_rate": statistics.median(found["silent"]),
    }
