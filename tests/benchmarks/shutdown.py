"""How soon other workers get the messages of one that was killed or told to end."""

from __future__ import annotations

import math
import signal
import time

from tests.benchmarks.app import QUEUE
from tests.benchmarks.report import Figures, Line, benchmark
from tests.benchmarks.rig import Rig, Worker
from tests.benchmarks.workers import due_at
from tests.kit.wait import wait_until

#: A worker needs about a second for a thousand tasks.
ON_TIME_SECONDS, PATIENCE_SECONDS = 2, 10

POOLS = {"prefork": 2, "threads": 2, "gevent": 2, "solo": 1}
SIGNALS = {
    "TERM": (signal.SIGTERM,),
    "QUIT": (signal.SIGQUIT,),
    "INT twice": (signal.SIGINT, signal.SIGINT),
}
CLAIMED = 8
TASK_SECONDS = 5.0
#: Celery learns of its pool's starts a little later.
SETTLE_SECONDS = 0.5


@benchmark(
    "recovery",
    Line(
        "{count:,.0f} tasks due in {ahead_s:.0f} s, their worker killed {before_s:.0f} s before, "
        f"another started: run within {ON_TIME_SECONDS} s (within {PATIENCE_SECONDS} s)",
        "{on_time:,.0f} ({run:,.0f})",
        "all {count:,.0f}",
        reached=lambda f: f["on_time"] == f["run"] == f["count"],
        stock="{stock_on_time:,.0f} ({stock_run:,.0f})",
    ),
    stock=True,
)
def recovery(rig: Rig) -> Figures:
    """The effect of a killed worker on tasks that are not due yet."""
    count = rig.scaled(1_000, 500)
    ahead_seconds, before_seconds = rig.scaled((15, 5), (9, 4))
    first = rig.start_worker().await_ready()
    due = time.time() + ahead_seconds
    rig.send(due_at(due, count))
    time.sleep(max(due - before_seconds - time.time(), 0))
    first.kill()
    rig.start_worker().await_ready()
    end = due + PATIENCE_SECONDS
    over = lambda: sum(w.count() for w in rig.workers) >= count or time.time() >= end  # noqa: E731
    wait_until(over, "the end", end - time.time() + 1)
    late = [start.at - due for start in rig.starts()]
    return {
        "ahead_s": ahead_seconds,
        "before_s": before_seconds,
        "count": count,
        "on_time": sum(each <= ON_TIME_SECONDS for each in late),
        "run": len({start.number for start in rig.starts()}),
        "max_s": max(late, default=0),
    }


def tell(worker: Worker, numbers: tuple[int, ...]) -> float:
    """Send signals, each after the worker logged the one before; returns when the last was sent."""
    for number in numbers[:-1]:
        heard = worker.log.stat().st_size
        worker.process.send_signal(number)
        wait_until(lambda: worker.log.stat().st_size > heard, "it has heard")  # noqa: B023
    told_at = time.monotonic()
    worker.process.send_signal(numbers[-1])
    return told_at


def measure_one(rig: Rig, pool: str, numbers: tuple[int, ...]) -> tuple[float, float]:
    """Seconds until waiting tasks are back, and running ones; infinite if they do not come back."""
    rig.redis.flushall()
    for _ in range(CLAIMED):
        rig.app.send_task("work_late", kwargs={"seconds": TASK_SECONDS})
    worker = rig.start_worker("-P", pool).await_ready()
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


def _line(what: str) -> Line:
    def shown(f: Figures, side: str = "") -> str:
        found = (f[f"{side}{what} {which}"] for which in ("waiting", "running"))
        return "; ".join("not back" if math.isinf(each) else f"{each:.2f}" for each in found)

    pool, _, name = what.partition(" ")
    return Line(
        f"{pool} pool, {name}: seconds until what was not begun is at the head of its queue; "
        f"what runs, for {TASK_SECONDS:g} s",
        shown,
        "≤ 1",
        reached=lambda f: f[f"{what} waiting"] <= 1,
        stock=lambda f: shown(f, "stock_"),
    )


@benchmark("shutdown", *(_line(f"{pool} {name}") for pool in POOLS for name in SIGNALS), stock=True)
def shutdown(rig: Rig) -> Figures:
    figures: Figures = {}
    for pool in POOLS:
        for name, numbers in SIGNALS.items():
            waiting, running = measure_one(rig, pool, numbers)
            figures |= {f"{pool} {name} waiting": waiting, f"{pool} {name} running": running}
    return figures
