"""How soon the messages of a worker that is told to end are at the head of their queue."""

from __future__ import annotations

import math
import signal
import time

from tests.benchmarks.app import QUEUE
from tests.benchmarks.report import NOTHING, Benchmark, Figures, Row
from tests.benchmarks.rig import Rig, Worker
from tests.kit.wait import wait_until

POOLS = {"prefork": 2, "threads": 2, "gevent": 2, "solo": 1}
SIGNALS = {
    "TERM": (signal.SIGTERM,),
    "QUIT": (signal.SIGQUIT,),
    "INT twice": (signal.SIGINT, signal.SIGINT),
}
CLAIMED = 8
TASK_SECONDS = 5.0
LIMIT_SECONDS = 1.0
#: Celery hears of what its pool has begun a little later.
SETTLE_SECONDS = 0.5


def tell(worker: Worker, numbers: tuple[int, ...]) -> float:
    """Send signals, each when the one before it was heard; returns when the last one was sent."""
    for number in numbers[:-1]:
        heard = worker.log.stat().st_size
        worker.process.send_signal(number)
        wait_until(lambda: worker.log.stat().st_size > heard, "it has heard")  # noqa: B023
    told_at = time.monotonic()
    worker.process.send_signal(numbers[-1])
    return told_at


def measure_one(rig: Rig, pool: str, numbers: tuple[int, ...]) -> tuple[float, float]:
    """Seconds until what was not begun is back, and what runs; infinite: it does not come back."""
    rig.redis.flushall()
    for _ in range(CLAIMED):
        rig.app.send_task("work_late", kwargs={"seconds": TASK_SECONDS})
    worker = rig.start_worker("-P", pool)
    worker.await_ready()
    wait_until(lambda: worker.count() >= POOLS[pool], "it is busy", 30)
    time.sleep(SETTLE_SECONDS)
    waiting = CLAIMED - POOLS[pool]
    began = time.monotonic()
    told_at = tell(worker, numbers)
    back: dict[int, float] = {}
    while len(back) < 2 and time.monotonic() < told_at + TASK_SECONDS + 3:
        count = rig.redis.llen(QUEUE)
        for goal, start in ((waiting, began), (CLAIMED, told_at)):
            if count >= goal:
                back.setdefault(goal, time.monotonic() - start)
        if worker.process.poll() is not None:
            break
        time.sleep(0.002)
    worker.kill()
    return back.get(waiting, math.inf), back.get(CLAIMED, math.inf)


def measure(rig: Rig) -> Figures:
    figures: Figures = {}
    for pool in POOLS:
        for name, numbers in SIGNALS.items():
            waiting, running = measure_one(rig, pool, numbers)
            figures |= {f"{pool} {name} waiting": waiting, f"{pool} {name} running": running}
    return figures


def rows(stock: Figures, ours: Figures) -> list[Row]:
    return [
        Row(
            f"{pool} pool, {name}: seconds until what was not begun is at the head of its queue; "
            f"what runs, for {TASK_SECONDS:g} s",
            f"≤ {LIMIT_SECONDS:g}",
            _text(stock, pool, name),
            _text(ours, pool, name),
            NOTHING,
            ours[f"{pool} {name} waiting"] <= LIMIT_SECONDS,
        )
        for pool in POOLS
        for name in SIGNALS
    ]


def _text(figures: Figures, pool: str, name: str) -> str:
    waiting, running = (figures[f"{pool} {name} {which}"] for which in ("waiting", "running"))
    return f"{_seconds(waiting)}; {_seconds(running)}"


def _seconds(value: float) -> str:
    return "not back" if math.isinf(value) else f"{value:.2f}"


BENCHMARKS = [Benchmark("shutdown", measure, rows)]
