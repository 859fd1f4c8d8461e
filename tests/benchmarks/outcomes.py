"""The cost for a worker of recording the outcomes of its tasks."""

from __future__ import annotations

import statistics
import time

from tests.benchmarks.app import EXTENDED
from tests.benchmarks.report import Figures, Line, benchmark
from tests.benchmarks.rig import WARM_UP, Rig, cpu_seconds, processor_seconds

#: Relative to the throughput of a worker that records nothing.
COST = 0.03

#: How often a worker writes.
INTERVAL_SECONDS = 1.0


def _drain(rig: Rig, count: int, extended: str) -> Figures:
    """Tasks per second, and the processor time of each in the worker and in the server."""
    rig.redis.flushall()
    rig.send(((), {}) for _ in range(count))
    worker = rig.start_worker(environment={EXTENDED: extended})
    rig.await_done(WARM_UP, 60, [worker])
    began, worker_began, server_began = (
        worker.count(),
        processor_seconds(worker.pid),
        cpu_seconds(rig.redis),
    )
    rig.await_done(count, 120, [worker])
    time.sleep(2 * INTERVAL_SECONDS)  # it writes its latest outcomes
    tasks = count - began
    found = {
        "worker_us": (processor_seconds(worker.pid) - worker_began) / tasks * 1e6,
        "server_us": (cpu_seconds(rig.redis) - server_began) / tasks * 1e6,
    }
    starts = worker.starts()
    worker.kill()
    rate = (count - WARM_UP) / (starts[-1].at - starts[WARM_UP - 1].at)
    return {"rate": rate, **found}


@benchmark(
    "outcomes",
    Line(
        "tasks that do nothing through one worker (prefork, `-c 2`) that records their outcomes "
        "and counts them for trends (that records none)",
        "{rate:,.0f}/s ({silent_rate:,.0f}/s)",
        f"≥ {1 - COST:.2f} × a worker that records none",  # noqa: RUF001
        ("rate", "silent_rate"),
        lambda f: f["rate"] / f["silent_rate"] >= 1 - COST,
    ),
    Line(
        "the same: processor time of a task in the worker's main process (that records none)",
        "{worker_us:.0f} µs ({silent_worker_us:.0f} µs)",
        ratio=("worker_us", "silent_worker_us"),
    ),
    Line(
        "the same: processor time of a task in the server (with a worker that records none)",
        "{server_us:.0f} µs ({silent_server_us:.0f} µs)",
        ratio=("server_us", "silent_server_us"),
    ),
)
def outcomes(rig: Rig) -> Figures:
    """With and without in turn, as the machine's speed drifts; the medians of ten."""
    count = rig.scaled(10_000, 2_000)
    found: dict[str, list[Figures]] = {"": [], "silent_": []}
    sides = [("", "yes"), ("silent_", "silent")]
    for _ in range(rig.scaled(10, 1)):
        for prefix, extended in sides:
            found[prefix].append(_drain(rig, count, extended))
        sides.reverse()
    return {
        prefix + name: statistics.median(each[name] for each in figures)
        for prefix, figures in found.items()
        for name in figures[0]
    }
