"""The faults, and the seeded schedule by which they strike."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import RedisError

from tests.crash.crew import Crew
from tests.kit.servers import Server

#: Fault -> its share.
SHARES = {
    "kill": 24,
    "kill main": 10,
    "stop": 8,
    "term": 10,
    "quit": 6,
    "server kill": 8,
    "clients killed": 10,
    "script flush": 5,
    "server sleep": 5,
    "pause": 5,
    "cut": 9,
}

#: What ends a process at once, with no chance to clean up.
KILLS = frozenset({"kill", "kill main", "server kill", "failover"})

MEANINGS = {
    "kill": "SIGKILL of a worker and its pool",
    "kill main": "SIGKILL of a prefork worker's main process alone",
    "stop": "SIGSTOP for longer than the lease, then SIGCONT",
    "term": "SIGTERM of a worker (warm shutdown)",
    "quit": "SIGQUIT of a worker (cold shutdown)",
    "server kill": "SIGKILL and restart of the server",
    "clients killed": "CLIENT KILL TYPE normal",
    "script flush": "SCRIPT FLUSH",
    "server sleep": "DEBUG SLEEP, 0.3 to 1.2 s",
    "pause": "network stands still, 0.3 to 1.2 s",
    "cut": "network cut, 0.3 to 1.2 s",
    "failover": "SIGKILL of the master, a replica takes over",
    "slot moved": "the slot of a shard moves to another master",
}


def schedule(
    seed: int, seconds: float, interval_seconds: float, shares: dict[str, int] = SHARES
) -> list[tuple[float, str]]:
    """When which fault strikes, in seconds from the start."""
    rng = random.Random(seed)
    plan, at = [], 2.0
    while at < seconds:
        plan.append((at, rng.choices(list(shares), list(shares.values()))[0]))
        at += interval_seconds * rng.uniform(0.4, 1.6)
    return plan


@dataclass
class Window:
    """When a fault lasted."""

    kind: str
    began: float
    ended: float
    victim: str = ""


@dataclass
class Faults:
    """Does what the schedule says; `step` is called often."""

    crew: Crew
    server: Server
    proxy: Any  # a Proxy, or None where there is none in between
    lease_seconds: float
    rng: random.Random
    plan: list[tuple[float, str]]
    counts: Counter[str] = field(default_factory=Counter)
    windows: list[Window] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._order = itertools.count()
        self._began = time.monotonic()
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        for at, kind in self.plan:
            self._at(self._began + at, lambda kind=kind: self._strike(kind))

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._later, (when, next(self._order), action))

    def step(self) -> None:
        self.crew.look_after()
        while self._later and self._later[0][0] <= time.monotonic():
            heapq.heappop(self._later)[2]()

    def finish(self) -> None:
        """Undo what lasts; nothing strikes any more."""
        self._later.clear()
        if self.proxy is not None:
            self.proxy.resume()
            self.proxy.heal()
        for life in self.crew.current.values():
            self.crew.resume(life)

    def _strike(self, kind: str) -> None:
        began = time.time()
        victim = getattr(self, "_" + kind.replace(" ", "_"))()
        if victim is None:
            return
        self.counts[kind] += 1
        if kind not in ("stop", "pause", "cut"):  # these end later
            self.windows.append(Window(kind, began, time.time(), victim))

    def _lasts(self, kind: str, seconds: float, undo: Callable[[], None], victim: str = "") -> None:
        window = Window(kind, time.time(), float("inf"), victim)
        self.windows.append(window)

        def end() -> None:
            undo()
            window.ended = time.time()

        self._at(time.monotonic() + seconds, end)

    # Workers.

    def _kill(self) -> str | None:
        life = self.crew.choose(self.rng)
        if life:
            self.crew.kill(life)
        return life and life.name

    def _kill_main(self) -> str | None:
        life = self.crew.choose(self.rng, "prefork") or self.crew.choose(self.rng)
        if life:
            self.crew.kill(life, "main killed", main_only=True)
        return life and life.name

    def _stop(self) -> str | None:
        life = self.crew.choose(self.rng)
        if life:
            self.crew.stop(life)
            seconds = self.lease_seconds + self.rng.uniform(0.5, 2.5)
            self._lasts("stop", seconds, lambda: self.crew.resume(life), life.name)
        return life and life.name

    def _term(self) -> str | None:
        life = self.crew.choose(self.rng)
        if life:
            self.crew.end(life, signal.SIGTERM, "terminated")
        return life and life.name

    def _quit(self) -> str | None:
        life = self.crew.choose(self.rng)
        if life:
            self.crew.end(life, signal.SIGQUIT, "quit")
        return life and life.name

    # The server and the way to it.

    def _server_kill(self) -> str:
        self.server.kill()
        time.sleep(self.rng.uniform(0, 0.8))
        self.server.start()
        return "server"

    def _command(self, *command: str) -> str:
        with contextlib.suppress(RedisError), self.server.client(socket_timeout=5) as client:
            client.execute_command(*command)
        return "server"

    def _clients_killed(self) -> str:
        return self._command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    def _script_flush(self) -> str:
        return self._command("SCRIPT", "FLUSH")

    def _server_sleep(self) -> str:
        return self._command("DEBUG", "SLEEP", f"{self.rng.uniform(0.3, 1.2):.2f}")

    def _pause(self) -> str | None:
        if self.proxy.held:
            return None
        self.proxy.pause()
        self._lasts("pause", self.rng.uniform(0.3, 1.2), self.proxy.resume)
        return "network"

    def _cut(self) -> str:
        self.proxy.cut()
        self._lasts("cut", self.rng.uniform(0.3, 1.2), self.proxy.heal)
        return "network"
