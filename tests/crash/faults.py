"""The faults of workers, their pools, a server, its clock and the way to it."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from tests.crash.clock import Clock
from tests.crash.crew import Crew, Life
from tests.crash.load import LIMIT_SECONDS, Senders
from tests.crash.network import Network
from tests.crash.operator import Operator
from tests.crash.schedule import (
    CALM_SECONDS,
    CLOCKS,
    LASTING,
    OPERATED,
    QUIET_SECONDS,
    TRYING,
)
from tests.kit.servers import Server

#: A fault with no victim, or with something in its way, is retried this often, at this interval.
TRIES, AGAIN_SECONDS = 40, 1.5
#: How long workers of two versions, or with different policies, run side by side.
MIXED_SECONDS = 8.0
TERMINATE_SECONDS, TERMINATE_EVERY_SECONDS = 25.0, 1.0
#: The tasks that make a pool of one process grow.
BURST, BURST_TASK_SECONDS = 12, 0.5
#: The fewest and most leases for which a greenlet does not yield, and an outage lasts.
NO_YIELD_LEASES, OUTAGE_LEASES = (1.3, 2.0), (1.5, 3.0)
#: Tasks that must run while the server is out of reach are sent this long before.
AHEAD_SECONDS, RUNNING = 1.0, 6
#: How many leases each step of the clock lasts.
HOLD_LEASES = 1.2


@dataclass
class Window:
    """When a fault lasted."""

    kind: str
    began: float
    ended: float
    victim: str = ""


@dataclass
class Field:
    """The targets of faults, and the functions that report how a task fares."""

    crew: Crew
    server: Any  # a Server, or a stand-in for the master or the Cluster
    network: Network | None
    clock: Clock | None
    senders: Senders
    lease_seconds: float
    #: Whether a task has started, and whether it is over.
    started: Callable[[str], bool] = lambda id: False
    ended: Callable[[str], bool] = lambda id: True
    operator: Operator | None = None


@dataclass
class Faults:
    """Follows the schedule; `step` is called often.

    Each fault is a method of its name. It returns its victim, or None if it finds none now.
    """

    field: Field
    rng: random.Random
    plan: list[tuple[float, str]]
    counts: Counter[str] = field(default_factory=Counter)
    windows: list[Window] = field(default_factory=list)

    #: The password of the servers.
    password = ""

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
        return [self.field.server]

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
        """Undo lasting faults; nothing strikes any more."""
        self._later.clear()
        self._be_quiet(False)
        now = time.time()
        for window in self.windows:
            window.ended = min(window.ended, now)
        for life in self.crew.current.values():
            self.crew.resume(life)
        if self.field.network is not None:
            self.field.network.restore()
        self._step_clock(0)
        self.crew.changed.clear()
        self._deploy(self.crew.unlike)

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

    # Workers.

    def _on_one(self, strike: Callable[[Life], object], *pools: str) -> str | None:
        """Strike a worker of some pools, or of any pool if these have none."""
        life = self.crew.choose(self.rng, *pools) or self.crew.choose(self.rng)
        if life:
            strike(life)
        return life and life.name

    def _kill(self) -> str | None:
        return self._on_one(self.crew.kill)

    def _kill_main(self) -> str | None:
        kill = lambda life: self.crew.kill(life, "main killed", main_only=True)  # noqa: E731
        return self._on_one(kill, "prefork")

    def _stop(self) -> str | None:
        def stop(life: Life) -> None:
            self.crew.stop(life)
            seconds = self.lease_seconds + self.rng.uniform(0.5, 2.5)
            self._lasts("stop", seconds, lambda: self.crew.resume(life), life.name)

        return self._on_one(stop)

    def _term(self) -> str | None:
        return self._on_one(lambda life: self.crew.end(life, signal.SIGTERM, "terminated"))

    def _quit(self) -> str | None:
        return self._on_one(lambda life: self.crew.end(life, signal.SIGQUIT, "quit"))

    def _redeploy(self) -> str | None:
        """Half of the slots run the previous version for a while."""
        slots = range(self.rng.randrange(2), len(self.crew.slots), 2)
        return self._changed("redeploy", slots, "previous")

    def _policyless(self) -> str | None:
        return self._changed("policyless", [self.rng.randrange(len(self.crew.slots))], "policyless")

    def _changed(self, kind: str, slots: Collection[int], how: str) -> str | None:
        if self.crew.is_mixed or self._is_on(*TRYING):
            return None

        def undo() -> None:
            for slot in slots:
                self.crew.changed.pop(slot, None)
            self._deploy(slots)

        self.crew.changed.update(dict.fromkeys(slots, how))
        self._deploy(slots)
        self._lasts(kind, MIXED_SECONDS, undo)
        return "half"

    def _deploy(self, slots: Collection[int]) -> None:
        for slot in slots:
            life = self.crew.current[slot]
            self.crew.resume(life)
            if not life.fate:
                self.crew.end(life, signal.SIGTERM, "terminated")

    # Pools.

    def _time_limit(self) -> str:
        for late in (True, False):
            self.field.senders.send_overrun(late, limit_seconds=LIMIT_SECONDS)
        return "child"

    def _terminate(self) -> str:
        """Begin a task that would take long, then revoke it until it has ended."""
        id = self.field.senders.send_overrun(late=self.rng.random() < 0.5)
        self._revoke_later(id, time.monotonic() + TERMINATE_SECONDS)
        return "child"

    def _revoke_later(self, id: str, until: float) -> None:
        def revoke() -> None:
            if self.field.ended(id) or time.monotonic() > until:
                return
            if self.field.started(id):  # in a thread: it waits while the network stands still
                threading.Thread(target=self._revoke, args=(id,), daemon=True).start()
            self._revoke_later(id, until)

        self._in(TERMINATE_EVERY_SECONDS, revoke)

    def _revoke(self, id: str) -> None:
        with contextlib.suppress(OperationalError, RedisError, OSError):
            self.field.senders.app.control.revoke(id, terminate=True)

    def _autoscale(self) -> str:
        for _ in range(BURST):
            self.field.senders.send_long(BURST_TASK_SECONDS, "prefork")
        return "pool"

    def _no_yield(self) -> str:
        leases = self.rng.uniform(*NO_YIELD_LEASES)
        self.field.senders.send_busy(leases * self.lease_seconds)
        return "greenlets"

    # The server and the way to it.

    def _command(self, *command: str) -> str:
        options = {"password": self.password} if self.password else {}
        for server in self.servers:
            with (
                contextlib.suppress(RedisError),
                server.client(socket_timeout=5, **options) as client,
            ):
                client.execute_command(*command)
        return "server"

    def _server_kill(self) -> str:
        self.field.server.kill()
        time.sleep(self.rng.uniform(0, 0.8))
        self.field.server.start()
        return "server"

    def _clients_killed(self) -> str:
        return self._command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    def _operate(self, kind: str, act: str) -> str | None:
        if self._is_on(*OPERATED):
            return None
        window = Window(kind, time.time(), float("inf"))
        self.windows.append(window)

        def end() -> None:
            window.ended = time.time()

        getattr(self.field.operator, act)(self.rng, end)
        return ""

    def _queue_paused(self) -> str | None:
        return self._operate("queue paused", "pause_queue")

    def _tenant_paused(self) -> str | None:
        return self._operate("tenant paused", "pause_tenant")

    def _limit_lowered(self) -> str | None:
        return self._operate("limit lowered", "lower_limit")

    def _script_flush(self) -> str:
        return self._command("SCRIPT", "FLUSH")

    def _server_sleep(self) -> str:
        return self._command("DEBUG", "SLEEP", f"{self.rng.uniform(0.3, 1.2):.2f}")

    def _pause(self) -> str | None:
        network = self.field.network
        if network is None or network.held:
            return None
        network.pause()
        self._lasts("pause", self.rng.uniform(0.3, 1.2), network.resume)
        return "network"

    def _cut(self) -> str | None:
        network = self.field.network
        if network is None or network.is_cut:
            return None
        network.cut()
        self._lasts("cut", self.rng.uniform(0.3, 1.2), network.heal)
        return "network"

    def _outage(self) -> str | None:
        """Cut the server off while tasks run that began before."""
        seconds = self._outage_seconds()
        if self._is_on("outage") or not self._can_cut():
            return None

        def begin() -> None:
            if self._can_cut():
                self._cut_all(seconds)
            else:
                self.counts["outage"] -= 1
                self._in(AGAIN_SECONDS, lambda: self._strike("outage"))

        self._running(seconds)
        self._in(AHEAD_SECONDS, begin)
        return "network"

    def _outage_of_one(self) -> str | None:
        network, life = self.field.network, self.crew.choose(self.rng)
        if network is None or life is None or network.is_alone(life.slot):
            return None
        seconds = self._outage_seconds()

        def begin() -> None:
            network.cut_off(life.slot)
            undo = lambda: network.connect_again(life.slot)  # noqa: E731
            self._lasts("outage of one", seconds, undo, life.name)

        self._running(seconds)
        self._in(AHEAD_SECONDS, begin)
        return life.name

    def _outage_seconds(self) -> float:
        return self.lease_seconds * self.rng.uniform(*OUTAGE_LEASES)

    def _running(self, seconds: float) -> None:
        """Start tasks that run for longer than the fault that follows."""
        for _ in range(RUNNING):
            self.field.senders.send_long(seconds + 2 * AHEAD_SECONDS)

    def _can_cut(self) -> bool:
        return self.field.network is not None and not self.field.network.is_cut

    def _cut_all(self, seconds: float) -> None:
        assert self.field.network
        self.field.network.cut()
        self._lasts("outage", seconds, self.field.network.heal)

    # The clock: it steps ahead, back beyond the right time, and to the right time again.

    def go_to_latest(self) -> None:
        """Show the latest time ever shown, so that all tasks scheduled until then become due."""
        if self.field.clock is not None:
            began = time.time()
            self._step_clock(max(span.ahead_seconds for span in self.field.clock.readings.spans))
            self.windows.append(Window("clock hour", began, time.time()))

    def _clock_minute(self) -> str | None:
        return self._clock("clock minute", 60)

    def _clock_hour(self) -> str | None:
        return self._clock("clock hour", 3600)

    def _clock(self, kind: str, seconds: float) -> str | None:
        if self.field.clock is None or self._is_on(*CLOCKS):
            return None
        hold = HOLD_LEASES * self.lease_seconds
        self._running(2 * hold)

        def begin() -> None:
            self._step_clock(seconds)
            self._in(hold, lambda: self._step_clock(-seconds))

        self._in(AHEAD_SECONDS, begin)
        self._lasts(kind, AHEAD_SECONDS + 2 * hold, lambda: self._step_clock(0))
        return "clock"

    def _step_clock(self, ahead_seconds: float) -> None:
        clock = self.field.clock
        if clock is not None and clock.readings.ahead_seconds != ahead_seconds:
            clock.show(ahead_seconds, self.servers, self.password)
