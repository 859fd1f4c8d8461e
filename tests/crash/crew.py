"""The workers: real Celery processes in slots. One that dies is replaced."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tests.crash.journal import WORKER
from tests.crash.limits import NEW_QUEUES
from tests.crash.load import GREENLETS, LONG, PREFORK
from tests.kit.epolls import ghosts
from tests.kit.previous import install_previous
from tests.kit.tasks_app import Settings
from tests.kit.workers import ROOT, Worker


class Slot(NamedTuple):
    """A worker that is always there; `queues` are those that only some pools have."""

    name: str
    pool: str
    concurrency: int
    queues: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


_AUTOSCALE = ("--autoscale=4,1", "--max-tasks-per-child=25")
SLOTS = tuple(
    slot
    for slot in (
        Slot("prefork", "prefork", 2, (LONG, PREFORK)),
        Slot("autoscale", "prefork", 4, (LONG, PREFORK), _AUTOSCALE),
        Slot("threads", "threads", 4, (LONG,)),
        Slot("solo", "solo", 1),
        Slot("gevent", "gevent", 8, (LONG, GREENLETS)),
        Slot("eventlet", "eventlet", 8, (LONG, GREENLETS)),
    )
    if slot.pool != "eventlet" or find_spec("eventlet")
)

#: A pool shrinks after it has been idle for this long.
AUTOSCALE_SECONDS = 2

TERM_SECONDS = 60
STACKS_SECONDS = 0.5


@dataclass
class Life:
    """One worker process and its children, from start to end. Times are of `time.time`."""

    name: str
    pool: str
    worker: Worker
    pid: int
    started_at: float
    slot: int = 0
    #: How it differs from others: see `Crew.changed`.
    unlike: str = ""
    #: How it ended: `killed`, `main killed`, `quit`, `terminated`, `hung`, `by itself` or
    #: `end of the run`.
    fate: str = ""
    #: When it was killed or told to end. If it ended on its own: when that was noticed.
    fated_at: float = float("inf")
    ended_at: float = float("inf")
    #: [stopped, continued]
    stops: list[list[float]] = field(default_factory=list)
    ready_at: float = float("inf")
    #: The end of its log, if it hung or ended on its own.
    last_words: str = ""

    @property
    def ready(self) -> bool:
        return self.ready_at < float("inf")

    @property
    def stopped(self) -> bool:
        return bool(self.stops) and self.stops[-1][1] == float("inf")

    @property
    def is_told(self) -> bool:
        """Whether it was told to end in the middle of the run."""
        return self.fate in ("terminated", "quit")

    @property
    def log(self) -> str:
        return self.worker.log_path.read_text(errors="replace")

    def describe(self) -> str:
        stops = "".join(f", stopped {a:.3f} to {b:.3f}" for a, b in self.stops)
        fate = f", {self.fate} at {self.fated_at:.3f}, ended {self.ended_at:.3f}"
        return f"{self.name} ({self.pool}, pid {self.pid}{stops}{fate if self.fate else ''})"


def _version(how: str, env: dict[str, str]) -> dict[str, Any]:
    """Returns the start options of a worker that differs from the others."""
    if how == "policyless":
        return {"env": {**env, "KOMBU_DELAYED_TEST_POLICYLESS": "1"}}
    if how == "previous":
        site = install_previous().site
        # The app and its journal are of this version.
        return {"env": {**env, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}, "root": site}
    return {"env": env}


class Crew:
    """One living worker in each slot."""

    def __init__(
        self, settings: Callable[[int], Settings], directory: Path, queues: Iterable[str]
    ) -> None:
        self.slots = SLOTS
        self._queues = [*queues]
        self._settings = settings
        self._directory = directory
        #: Slot -> how it differs from the others: it runs the "previous" version, or "policyless".
        self.changed: dict[int, str] = {}
        self.lives: list[Life] = []
        self.current: dict[int, Life] = {}
        self._replaces = True
        #: When a worker was last seen to have ended.
        self.changed_at = 0.0

    def start(self) -> None:
        for slot in range(len(self.slots)):
            self._start(slot)

    def _start(self, number: int) -> None:
        slot, how = self.slots[number], self.changed.get(number, "")
        name = f"{slot.name}{len(self.lives) + 1}{how[:4]}"
        worker = Worker(
            self._settings(number),
            self._directory,
            name=name,
            module="tests.crash.app",
            pool=slot.pool,
            concurrency=slot.concurrency,
            queues=[*self._queues_of(how), *slot.queues],
            options=slot.options,
            **_version(how, {WORKER: name, "AUTOSCALE_KEEPALIVE": str(AUTOSCALE_SECONDS)}),
        )
        worker.start(wait=False)
        life = Life(name, slot.pool, worker, worker.pid, time.time(), number, how)
        self.lives.append(life)
        self.current[number] = life

    def _queues_of(self, how: str) -> list[str]:
        not_known = NEW_QUEUES if how == "previous" else ()
        return [queue for queue in self._queues if queue not in not_known]

    @property
    def is_mixed(self) -> bool:
        """Whether some workers differ from others, or have yet to be replaced for that."""
        return bool(self.changed or self.unlike)

    @property
    def unlike(self) -> list[int]:
        """The slots whose workers differ from the others."""
        return [slot for slot, life in self.current.items() if life.unlike]

    @property
    def is_whole(self) -> bool:
        """Whether all are ready and none is about to be replaced."""
        return not self.is_mixed and all(
            life.ready and not life.fate for life in self.current.values()
        )

    def is_ready(self, name: str, at: float) -> None:
        for life in self.current.values():
            if life.name == name:
                life.ready_at = at

    def ready_names(self) -> list[str]:
        """Those that should answer."""
        lives = list(self.current.values())
        return [life.name for life in lives if life.ready and not life.fate and not life.stopped]

    def ghosts(self) -> list[str]:
        """Descriptors that workers poll in vain: closed, or polled twice."""
        return [
            f"{life.name}: {ghost}"
            for life in self.current.values()
            if life.worker.running
            for ghost in ghosts(life.pid)
        ]

    def choose(self, rng: random.Random, *pools: str) -> Life | None:
        """Choose a running worker, a ready one if possible; None if those pools have none."""
        running = [
            life
            for life in self.current.values()
            if not life.fate and not life.stopped and (not pools or life.pool in pools)
        ]
        ready = [life for life in running if life.ready]
        return rng.choice(ready or running) if running else None

    def kill(self, life: Life, fate: str = "killed", main_only: bool = False) -> None:
        """SIGKILL the main process, and the children of its pool unless `main_only`."""
        life.fate, life.fated_at = fate, time.time()
        with contextlib.suppress(ProcessLookupError):
            if main_only:
                os.kill(life.pid, signal.SIGKILL)
            else:
                os.killpg(life.pid, signal.SIGKILL)
        self._wait_for_end(life)
        if self.current[life.slot] is life:
            self._ended(life)

    def end(self, life: Life, number: int, fate: str) -> None:
        """Ask it to end; `look_after` replaces it afterwards."""
        life.fate, life.fated_at = fate, time.time()
        os.kill(life.pid, number)

    def stop(self, life: Life) -> None:
        life.stops.append([time.time(), float("inf")])
        os.killpg(life.pid, signal.SIGSTOP)

    def resume(self, life: Life) -> None:
        if life.stopped:
            os.killpg(life.pid, signal.SIGCONT)
            life.stops[-1][1] = time.time()

    @property
    def is_ending(self) -> bool:
        """Whether one was told to end and has not yet: it may hold messages."""
        return any(life.is_told for life in self.current.values())

    def look_after(self) -> None:
        """Replace workers that have ended, and kill those that do not end."""
        for life in list(self.current.values()):
            if life.is_told and time.time() - life.fated_at > TERM_SECONDS:
                self._hung(life)
            elif not life.worker.running:
                self._ended(life)

    def _hung(self, life: Life) -> None:
        """Have a worker that did not end log the stacks of its threads, then kill it."""
        told_at = life.fated_at
        os.killpg(life.pid, signal.SIGUSR2)
        time.sleep(STACKS_SECONDS)
        self.kill(life, fate="hung")
        life.fated_at = told_at  # it may have done nothing from then on

    def _wait_for_end(self, *lives: Life) -> None:
        deadline = time.monotonic() + TERM_SECONDS
        while any(each.worker.running for each in lives) and time.monotonic() < deadline:
            time.sleep(0.002)

    def _ended(self, life: Life) -> None:
        life.ended_at = self.changed_at = time.time()
        if not life.fate:
            life.fate, life.fated_at = "by itself", life.ended_at
        if life.fate in ("by itself", "hung"):
            life.last_words = life.log[-3000:]
        if self._replaces:
            self._start(life.slot)

    def finish(self) -> None:
        """A warm shutdown of all workers; one that does not end is killed and counted as hung."""
        self._replaces = False
        for life in self.current.values():
            self.resume(life)
            if not life.fate:
                self.end(life, signal.SIGTERM, "end of the run")
        self._wait_for_end(*self.current.values())
        for life in self.current.values():
            if life.worker.running:
                self._hung(life)
            else:
                self._ended(life)
        self.close()

    def close(self) -> None:
        for life in self.lives:
            life.worker.kill()
