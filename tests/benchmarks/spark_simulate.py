"""The lateness of tasks in real workers, compared with the simulation of the same tasks."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import NamedTuple

from celery_ext.spark.simulation.model import Fleet
from celery_ext.spark.simulation.queue import Crash, Queue
from celery_ext.spark.simulation.result import PERCENTILES, mark
from kombu_delayed import sizing
from tests.benchmarks.app import OPTIONS
from tests.benchmarks.report import Figures, Line, Measure, benchmark, percentile
from tests.benchmarks.rig import Rig

WORKERS, SLOTS = 2, 2
LEASE_SECONDS = 3
#: From the sending of the first task until the first one is due.
AHEAD_SECONDS = 4
#: A simulation is right if it is this close.
NEAR, NEAR_MS = 0.25, 5


class Task(NamedTuple):
    """How many seconds after the earliest due time it is due, and how many it runs."""

    due: float
    seconds: float


def random_tasks(load: float, mean_seconds: float, seconds: float) -> list[Task]:
    """Independent tasks that keep a share `load` of all slots busy."""
    dice = random.Random(1)
    rate = load * WORKERS * SLOTS / mean_seconds
    tasks, due = [], 0.0
    while (due := due + dice.expovariate(rate)) < seconds:
        tasks.append(Task(due, min(dice.expovariate(1 / mean_seconds), 10 * mean_seconds)))
    return tasks


def simulated(tasks: Sequence[Task], *died: Crash) -> Figures:
    fleet = Fleet(workers=WORKERS, slots=SLOTS, lease_seconds=LEASE_SECONDS, restart_seconds=1e4)
    queue = Queue(fleet, crashes=died)
    queue.feed((due, seconds + sizing.TASK_SECONDS) for due, seconds in tasks)
    queue.drain()
    classes = {number: n for number, n in enumerate(queue.tally.classes) if n}
    marks = {name[:3]: mark(classes, share) * 1000 for name, share in PERCENTILES.items()}
    return {**marks, "max": queue.tally.most_seconds * 1000}


def nearest(tasks: Sequence[Task], dies_at: float | None, measured: Figures) -> Figures:
    """Which worker had promised to claim next when one died is chance: use the nearer case."""
    if dies_at is None:
        return simulated(tasks)
    deaths = [Crash(dies_at, worker, LEASE_SECONDS / 6) for worker in range(WORKERS)]
    cases = [simulated(tasks, death) for death in deaths]
    return min(cases, key=lambda found: abs(found["p95"] - measured["p95"]))


def play(rig: Rig, tasks: Sequence[Task], dies_at: float | None = None) -> Figures:
    """Run tasks through real workers, one of which may die, and through the simulation."""
    environment = {OPTIONS: json.dumps({"delayed_lease_seconds": LEASE_SECONDS})}
    workers = [rig.start_worker(environment=environment) for _ in range(WORKERS)]
    for worker in workers:
        worker.await_ready()
    begin = time.time() + AHEAD_SECONDS
    dues = (datetime.fromtimestamp(begin + task.due, timezone.utc) for task in tasks)
    rig.send(
        ((number, begin + task.due, task.seconds), {"eta": eta})
        for number, (task, eta) in enumerate(zip(tasks, dues, strict=True))
    )
    if time.time() > begin - 0.5:
        raise RuntimeError("the machine is too slow: the tasks were not sent in time")
    if dies_at is not None:
        time.sleep(max(begin + dies_at - time.time(), 0))
        workers[0].kill()
    rig.await_done(len(tasks), tasks[-1].due + 30)
    firsts = {start.number: start for start in reversed(rig.starts())}
    late_ms = [(start.at - start.due) * 1000 for start in firsts.values()]
    measured = {name[:3]: percentile(late_ms, share) for name, share in PERCENTILES.items()}
    measured["max"] = max(late_ms)
    sides = {"measured": measured, "simulated": nearest(tasks, dies_at, measured)}
    figures = {f"{side} {name}": ms for side, found in sides.items() for name, ms in found.items()}
    return {"count": float(len(tasks)), **figures}


def _near(f: Figures) -> bool:
    pairs = ((f[f"simulated {name[:3]}"], f[f"measured {name[:3]}"]) for name in PERCENTILES)
    return all(abs(said - found) <= NEAR * found + NEAR_MS for said, found in pairs)


def _told(side: str) -> str:
    marks = ", ".join(f"{{{side} {name[:3]}:,.0f}}" for name in PERCENTILES)
    return f"{marks} ({{{side} max:,.0f}}) ms"


def simulation(name: str, what: str) -> Callable[[Measure], Measure]:
    line = Line(
        f"lateness of {{count:,.0f}} tasks {what}: p50, p95, p99 (max), measured; simulated",
        f"{_told('measured')}; {_told('simulated')}",
        f"within {NEAR:.0%} and {NEAR_MS} ms",
        ("simulated p95", "measured p95"),
        _near,
    )
    return benchmark(name, line)


@simulation("simulate-steady", "of 30 ms at 70 % load")
def steady(rig: Rig) -> Figures:
    return play(rig, random_tasks(0.7, 0.03, rig.scaled(25, 5)))


@simulation("simulate-burst", "of which 1,500 of 20 ms are due at one instant")
def burst(rig: Rig) -> Figures:
    tasks = random_tasks(0.5, 0.03, rig.scaled(25, 5))
    return play(rig, sorted([*tasks, *[Task(2.0, 0.02)] * rig.scaled(1500, 300)]))


@simulation("simulate-long", "of 250 ms at 85 % load")
def long_ones(rig: Rig) -> Figures:
    """Long tasks, of which a worker may hold many while others are idle."""
    return play(rig, random_tasks(0.85, 0.25, rig.scaled(40, 8)))


@simulation("simulate-death", "of 100 ms at 40 % load, one of two workers killed")
def death(rig: Rig) -> Figures:
    return play(rig, random_tasks(0.4, 0.1, rig.scaled(25, 6)), dies_at=2.0)
