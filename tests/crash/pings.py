"""Constant checks: whether workers answer pings, and how soon a control task runs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from celery import Celery
from kombu.exceptions import OperationalError
from kombu.utils.uuid import uuid
from redis.exceptions import RedisError

from tests.crash.app import make_app
from tests.crash.crew import Life
from tests.crash.evidence import RECOVERY_SECONDS, Calm
from tests.crash.journal import WORKER, Reader
from tests.kit.servers import Server, start_server
from tests.kit.tasks_app import Settings
from tests.kit.workers import Worker

CONTROL = "control"
#: A solo worker answers when its task has ended.
ANSWER_SECONDS = 3.0


@dataclass(frozen=True)
class Ping:
    """The workers asked, and those that answered. `until`: how long answers were waited for."""

    at: float
    until: float
    asked: frozenset[str]
    answered: frozenset[str]


@dataclass
class Pings:
    """The outcome of pings to single workers while it was calm."""

    asked: int = 0
    #: How many workers were asked, including during faults.
    sent: int = 0
    #: When each was sent, and to whom.
    unanswered: list[tuple[float, str]] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not self.unanswered


class Repeated(threading.Thread):
    """Does something at intervals until it is told to stop."""

    every_seconds: float

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(self.every_seconds):
            self.step()

    def step(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        self._over.set()
        if self.is_alive():
            self.join(60)


class Pinger(Repeated):
    """Pings all workers that are ready."""

    every_seconds = 2.0

    def __init__(self, app: Celery, ready: Callable[[], Iterable[str]]) -> None:
        super().__init__()
        self._app = app
        self._ready = ready
        self.pings: list[Ping] = []

    def step(self) -> None:
        asked = frozenset(self._ready())
        # A failed sending shows nothing about the workers.
        with contextlib.suppress(OperationalError, RedisError, OSError):
            if asked:
                self._ping(asked)

    def _ping(self, asked: frozenset[str]) -> None:
        at, destination = time.time(), [f"{name}@test" for name in asked]
        answers = self._app.control.ping(destination, ANSWER_SECONDS, limit=len(asked))
        answered = frozenset(name.partition("@")[0] for answer in answers for name in answer)
        # If all have answered, the wait ended early.
        self.pings.append(Ping(at, time.time(), asked, answered))


class Control(Repeated):
    """Sends a task to a server and a worker of the stock transport that no fault strikes.

    Its lateness shows how long this machine makes a process wait.
    """

    every_seconds = 0.2

    def __init__(self, server: Server, journals: Path) -> None:
        super().__init__()
        journals.mkdir()
        url = server.url.replace("socket:", "redis+socket:")
        self.settings = Settings(url, None, {}, str(journals))
        self._sent: dict[str, float] = {}
        self._reader = Reader(journals)
        self._app = make_app(self.settings)

    def late(self) -> list[tuple[float, float]]:
        """When each was sent and when it started."""
        lines = self._reader.new_lines()
        started = {line["id"]: line["at"] for line in lines if line["event"] == "start"}
        return [(at, started[id]) for id, at in self._sent.items() if id in started]

    def step(self) -> None:
        self._sent[id := uuid()] = time.time()
        self._app.send_task("run_early", task_id=id, queue=CONTROL)


@contextlib.contextmanager
def control_task(directory: Path) -> Iterator[Control]:
    with start_server("valkey", directory / "server") as server:
        control = Control(server, directory / "journals")
        options: Any = {"module": "tests.crash.app", "pool": "prefork", "queues": (CONTROL,)}
        env = {WORKER: CONTROL}
        worker = Worker(control.settings, directory, name=CONTROL, env=env, **options)
        worker.start()
        try:
            yield control
        finally:
            control.stop()
            worker.kill()


def judge_pings(pings: Iterable[Ping], lives: Mapping[str, Life], calm: Calm) -> Pings:
    found = Pings()
    for ping in pings:
        found.sent += len(ping.asked)
        if calm.covers(ping.at, ping.until):
            for name in _expected(ping, lives):
                found.asked += 1
                if name not in ping.answered:
                    found.unanswered.append((ping.at, name))
    return found


def _expected(ping: Ping, lives: Mapping[str, Life]) -> Iterator[str]:
    for name in sorted(ping.asked):
        life = lives[name]
        if life.ready_at + RECOVERY_SECONDS < ping.at and ping.until < life.fated_at:
            yield name
