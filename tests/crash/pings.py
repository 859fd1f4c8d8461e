"""Whether workers answer pings, outside of faults."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from celery import Celery
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from tests.crash.calm import RECOVERY_SECONDS, Calm
from tests.crash.crew import Life

EVERY_SECONDS = 2.0
#: A solo worker answers when its task has ended.
ANSWER_SECONDS = 3.0


@dataclass(frozen=True)
class Ping:
    """Who was asked, and who answered. `until`: how long answers were waited for."""

    at: float
    until: float
    asked: frozenset[str]
    answered: frozenset[str]


@dataclass
class Pings:
    """What became of pings to single workers, while it was calm."""

    asked: int = 0
    #: How many workers were asked, also in the middle of a fault.
    sent: int = 0
    #: When each was sent, and to whom.
    unanswered: list[tuple[float, str]] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not self.unanswered


class Pinger:
    """A thread that pings all workers that are ready, at intervals."""

    def __init__(self, app: Celery, ready: Callable[[], Iterable[str]]) -> None:
        self._app = app
        self._ready = ready
        self.pings: list[Ping] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(60)

    def _run(self) -> None:
        while not self._over.wait(EVERY_SECONDS):
            # What could not be sent says nothing of the workers.
            with contextlib.suppress(OperationalError, RedisError, OSError):
                self._ping(frozenset(self._ready()))

    def _ping(self, asked: frozenset[str]) -> None:
        if not asked:
            return
        at, destination = time.time(), [f"{name}@test" for name in asked]
        answers = self._app.control.ping(destination, ANSWER_SECONDS, limit=len(asked))
        answered = frozenset(name.partition("@")[0] for answer in answers for name in answer)
        # Where all have answered, nobody was waited for.
        self.pings.append(Ping(at, time.time(), asked, answered))


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
