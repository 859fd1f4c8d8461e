"""What all faults have in common; each subject has a file of its own."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from redis.exceptions import RedisError

from tests.crash.clock import Clock
from tests.crash.crew import Crew
from tests.crash.load import Senders
from tests.crash.network import Network
from tests.crash.schedule import CALM_SECONDS, QUIET_SECONDS, TRYING
from tests.kit.servers import Server

#: They end later than they strike.
LASTING = frozenset(
    {"stop", "pause", "cut", "outage", "outage of one", "clock minute", "clock hour", "redeploy"}
    | {"policyless"}
)

#: What finds no victim, or something in its way, strikes again so often, so much later.
TRIES, AGAIN_SECONDS = 40, 1.5


@dataclass
class Window:
    """When a fault lasted."""

    kind: str
    began: float
    ended: float
    victim: str = ""


@dataclass
class Field:
    """What faults strike, and what tells them how it goes."""

    crew: Crew
    server: Any  # a Server, or what stands for the master or the Cluster
    network: Network | None
    clock: Clock | None
    senders: Senders
    lease_seconds: float
    #: Whether a task has started, and whether nothing of it is to come.
    started: Callable[[str], bool] = lambda id: False
    ended: Callable[[str], bool] = lambda id: True


@dataclass
class Faults:
    """Does what the schedule says; `step` is called often."""

    field: Field
    rng: random.Random
    plan: list[tuple[float, str]]
    counts: Counter[str] = field(default_factory=Counter)
    windows: list[Window] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.crew, self.lease_seconds = self.field.crew, self.field.lease_seconds
        self._order = itertools.count()
        self._began = time.monotonic()
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        for at, kind in self.plan:
            self._at(self._began + at, lambda kind=kind: self._strike(kind))
        for (at, _), (until, _) in pairwise(self.plan):
            if until - at > CALM_SECONDS:
                self._at(self._began + until - QUIET_SECONDS, lambda: self._be_quiet(True))
                self._at(self._began + until, lambda: self._be_quiet(False))

    def _be_quiet(self, quiet: bool) -> None:
        self.field.senders.quiet = quiet

    @property
    def servers(self) -> list[Server]:
        """All that run."""
        return [self.field.server]

    #: What the servers ask for.
    password = ""

    @property
    def owed(self) -> bool:
        """Whether something lasts, or a kind that was planned has not struck yet."""
        owed = {kind for _, kind in self.plan if not self.counts[kind]}
        return bool(owed) or self._is_on(*LASTING)

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._later, (when, next(self._order), action))

    def _in(self, seconds: float, action: Callable[[], None]) -> None:
        self._at(time.monotonic() + seconds, action)

    def step(self) -> None:
        self.crew.look_after()
        while self._later and self._later[0][0] <= time.monotonic():
            heapq.heappop(self._later)[2]()

    def finish(self) -> None:
        """Undo what lasts; nothing strikes any more."""
        self._later.clear()
        self._be_quiet(False)
        now = time.time()
        for window in self.windows:
            window.ended = min(window.ended, now)
        for life in self.crew.current.values():
            self.crew.resume(life)

    def _strike(self, kind: str, tries: int = TRIES) -> None:
        began = time.time()
        spared = kind in TRYING and self.crew.is_mixed
        victim = None if spared else getattr(self, "_" + kind.replace(" ", "_"))()
        if victim is None:
            if tries > 1:
                self._in(AGAIN_SECONDS, lambda: self._strike(kind, tries - 1))
            return
        self.counts[kind] += 1
        if kind not in LASTING:
            self.windows.append(Window(kind, began, time.time(), victim))

    def _lasts(self, kind: str, seconds: float, undo: Callable[[], None], victim: str = "") -> None:
        window = Window(kind, time.time(), float("inf"), victim)
        self.windows.append(window)

        def end() -> None:
            undo()
            window.ended = time.time()

        self._in(seconds, end)

    def _is_on(self, *kinds: str) -> bool:
        return any(w.kind in kinds and w.ended == float("inf") for w in self.windows)

    def _command(self, *command: str) -> str:
        options = {"password": self.password} if self.password else {}
        for server in self.servers:
            with (
                contextlib.suppress(RedisError),
                server.client(socket_timeout=5, **options) as client,
            ):
                client.execute_command(*command)
        return "server"
