"""What a backlog costs the worker."""

from __future__ import annotations

import subprocess
import time

from tests.benchmarks.app import QUEUE, batch
from tests.benchmarks.report import Benchmark, Figures, Row
from tests.benchmarks.rig import Rig
from tests.kit.wait import wait_until

WARM_UP = 500
SETTLE_SECONDS = 3
#: Below this it is the allocator's, not the backlog's.
NOISE_MIB = 2


def rss_mib(pid: int) -> float:
    shown = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, check=True)
    return int(shown.stdout) / 1024


def publish(rig: Rig, count: int, countdown: float | None) -> None:
    with batch(rig.app) as options:
        for _ in range(count):
            rig.app.tasks["work"].apply_async(countdown=countdown, **options)


def measure(rig: Rig) -> Figures:
    count = rig.scaled(100_000, 5_000)
    worker = rig.start_worker()
    worker.await_ready()
    publish(rig, WARM_UP, None)
    rig.await_done(WARM_UP, 30)
    time.sleep(SETTLE_SECONDS)
    before = rss_mib(worker.pid)
    publish(rig, count, 86_400)
    wait_until(lambda: rig.redis.llen(QUEUE) == 0, "the ready list is empty", 240, 0.1)
    time.sleep(SETTLE_SECONDS)
    return {"before_mib": before, "growth_mib": rss_mib(worker.pid) - before, "count": count}


def rows(stock: Figures, ours: Figures) -> list[Row]:
    return [
        Row(
            f"memory of a worker with a backlog of {ours['count']:,.0f} delayed tasks",
            "no growth",
            _text(stock),
            _text(ours),
            reached=ours["growth_mib"] <= NOISE_MIB,
        )
    ]


def _text(figures: Figures) -> str:
    return f"{figures['before_mib']:.0f} {figures['growth_mib']:+.1f} MiB"


BENCHMARKS = [Benchmark("memory", measure, rows, rounds=1)]
