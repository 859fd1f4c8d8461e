"""One queue and its workers, message by message: the recursion of Kiefer and Wolfowitz.

Messages are claimed in the order of their due times, those that were reclaimed before all others.
The worker that has waited longest claims as many messages as are ready and as it has room for. It
runs them in that order in its slots. So a claim settles when each message starts and ends, and
nothing else needs to be remembered.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

from kombu_delayed import sizing
from kombu_delayed.consumer.claiming.sources import SHARED_POLL_SECONDS
from kombu_delayed.consumer.lease.reclaim import JUST_AFTER_SECONDS

from .model import Fleet

#: States of a message: already counted; new; or started before its redelivery.
UNCOUNTED, FRESH, STARTED = 0, 1, 2

#: Lateness is counted in classes, each wider than the last by this factor.
_WIDTH = 1.01
_PER_CLASS = 1 / math.log(_WIDTH)
_LEAST_SECONDS = 1e-4
_CLASSES = 3000

#: A consumer polls after its longest interval between polls, or after this share of it.
SOONEST_POLL = 0.7

Held = tuple[float, float, float, int]


def class_of(seconds: float) -> int:
    if seconds <= _LEAST_SECONDS:
        return 0
    return min(int(math.log(seconds / _LEAST_SECONDS) * _PER_CLASS) + 1, _CLASSES - 1)


def seconds_of(number: int) -> float:
    """A lateness in the middle of a class, off by half a per cent at most."""
    return _LEAST_SECONDS * _WIDTH ** (number - 0.5) if number else 0.0


class Crash(NamedTuple):
    """A worker dies some time after its lease was renewed last, in the background."""

    at: float
    worker: int
    renewed_ago: float


NEVER = Crash(math.inf, 0, 0.0)


def crashes(fleet: Fleet, begin: float, dice: random.Random) -> Iterator[Crash]:
    rate = fleet.crash_rate * fleet.workers
    at = begin
    while rate:
        at += dice.expovariate(rate)
        ago = dice.uniform(0, fleet.lease_seconds / 3)
        yield Crash(at, dice.randrange(fleet.workers), ago)


@dataclass
class Tally:
    """Counts of the messages outside the warm-up: starts, lateness and redeliveries."""

    classes: list[int] = field(default_factory=lambda: [0] * _CLASSES)
    most_seconds: float = 0.0
    redelivered: int = 0
    lost: int = 0
    busy_seconds: float = 0.0

    def started(self, late_seconds: float) -> None:
        """A message is started for the first time."""
        late_seconds += sizing.DELIVERY_SECONDS
        self.classes[class_of(late_seconds)] += 1
        if late_seconds > self.most_seconds:
            self.most_seconds = late_seconds

    def never_started(self, late_seconds: float) -> None:
        """Its worker died before; it starts later than that, so `most_seconds` stays right."""
        self.classes[class_of(late_seconds + sizing.DELIVERY_SECONDS)] -= 1


class Queue:
    """A queue whose workers are idle at `begin`, or busy until the times `free_at`."""

    def __init__(
        self,
        fleet: Fleet,
        begin: float = 0.0,
        free_at: Iterable[float] = (),
        crashes: Iterable[Crash] = (),
    ) -> None:
        self.tally = Tally()
        self._late_acks, self._prefetch = fleet.acks_late, fleet.prefetch
        self._lease_seconds, self._restart_seconds = fleet.lease_seconds, fleet.restart_seconds
        self._poll_seconds = fleet.poll_seconds
        self._server_seconds, self._server_at = fleet.server_seconds, begin
        times = [*free_at] or [begin] * fleet.capacity
        #: Of each worker: when its slots are free, what it holds, when it claimed last.
        self._free = [times[n :: fleet.workers] for n in range(fleet.workers)]
        for each in self._free:
            heapify(each)
        self._held: list[list[Held]] = [[] for _ in self._free]
        self._claimed_at = [begin] * fleet.workers
        self._away_until = [-math.inf] * fleet.workers
        #: The workers with room, in the order in which they claim; and when others will have room.
        self._line = deque(w for w in range(fleet.workers) if self._free[w][0] <= begin)
        self._full = [(e[0], w) for w, e in enumerate(self._free) if e[0] > begin]
        heapify(self._full)
        self._now = begin
        #: The queue of the next message; of each, who claims from it right now, and its room.
        self._part, self._parts = 0, fleet.parts
        self._claims: dict[int, list[int]] = {}
        #: The messages that return when a lease expires.
        self._again: list[tuple[float, int, float, float, int]] = []
        self._given_back = 0
        self._crashes = iter(crashes)
        self._next_crash = next(self._crashes, NEVER)
        self._counting = False

    def feed(self, messages: Iterable[tuple[float, float]], counted: bool = True) -> None:
        """Deliver messages, (due, seconds in a slot), in the order in which they are due."""
        state = FRESH if counted else UNCOUNTED
        self._counting = counted
        for due, seconds in messages:
            if self._again or self._next_crash is not NEVER:
                self._catch_up(due)
            self._deliver(due, due, seconds, state)

    def drain(self) -> None:
        """No more is due: let all that is held end."""
        self._counting = False
        while True:
            end = max((each[0] for held in self._held for each in held), default=-math.inf)
            if not self._again and self._next_crash.at > end:
                return
            self._catch_up(max(end, self._again[0][0] if self._again else end))

    def _catch_up(self, until: float) -> None:
        """Process the events before anyone can claim the messages due at `until`."""
        again = self._again
        while True:
            soonest = self._soonest()
            back = max(again[0][0], soonest) if again else math.inf
            claim = max(until, soonest)
            if self._next_crash.at <= min(back, claim):
                self._crash()
            elif back <= claim:
                ready_at, _, due, seconds, state = heappop(again)
                self._deliver(ready_at, due, seconds, state)
            else:
                return

    def _soonest(self) -> float:
        if self._line or any(room for _, room in self._claims.values()):
            return self._now
        self._end_claims()
        return self._now if self._line else self._full[0][0]

    def _deliver(self, ready_at: float, due: float, seconds: float, state: int) -> None:
        worker = self._claim(ready_at)
        now = self._now
        if self._server_seconds:
            self._now = now = max(now, self._server_at)
            self._server_at = now + self._server_seconds
        free = self._free[worker]
        start = free[0] if free[0] > now else now
        end = start + seconds
        heapreplace(free, end)
        leaves = end if self._late_acks else start
        if leaves > now:
            heappush(self._held[worker], (leaves, due, seconds, state))
        tally = self.tally
        if state:
            tally.busy_seconds += seconds
            if state == FRESH:
                tally.started(start - due)

    def _claim(self, ready_at: float) -> int:
        """The worker that takes a message: it claims from that queue now, or is next in line."""
        part = self._part = (self._part + 1) % self._parts
        claim = self._claims.get(part)
        if ready_at > self._now:
            self._end_claims()
        elif claim is not None:
            if claim[1]:
                claim[1] -= 1
                return claim[0]
            self._wait(self._claims.pop(part)[0])
        now = max(self._now, ready_at)
        self._let_wait(now)
        if not self._line:
            self._end_claims()
        if self._line:
            worker = self._line.popleft()
        else:
            now, worker = heappop(self._full)
        held = self._held[worker]
        while held and held[0][0] <= now:
            heappop(held)
        self._now = self._claimed_at[worker] = now
        self._claims[part] = [worker, self._prefetch - len(held) - 1]
        return worker

    def _let_wait(self, now: float) -> None:
        """Put the workers that have room by now in line."""
        full = self._full
        while full and full[0][0] <= now:
            self._line.append(heappop(full)[1])

    def _end_claims(self) -> None:
        for worker, _ in self._claims.values():
            self._wait(worker)
        self._claims.clear()

    def _wait(self, worker: int) -> None:
        """Its claim has ended: it is last in line, or has to wait for room."""
        held = self._held[worker]
        if len(held) < self._prefetch:
            self._line.append(worker)
        else:
            heappush(self._full, (held[0][0], worker))

    def _crash(self) -> None:
        """Let a worker die: the messages that it holds return when its lease has expired."""
        self._end_claims()
        crash, self._next_crash = self._next_crash, next(self._crashes, NEVER)
        at, worker, renewed_ago = crash
        if at < self._away_until[worker]:
            return
        ago = max(min(at - self._claimed_at[worker], renewed_ago), 0.0)
        back = at + self._lease_seconds - ago + JUST_AFTER_SECONDS
        held = sorted(each for each in self._held[worker] if each[0] > at)
        if self._counting and not self._late_acks:
            self._lose(at, self._free[worker], [seconds for _, _, seconds, _ in held])
        for each in held:
            self._give_back(each, at, back)
        if self._is_next(worker, at):
            self._stall(worker, at, min(back, at + self._restart_seconds))
        self._replace(worker, at + self._restart_seconds)

    def _give_back(self, held: Held, at: float, back: float) -> None:
        leaves, due, seconds, state = held
        start = leaves - seconds if self._late_acks else leaves
        if state:
            self.tally.redelivered += 1
            self.tally.busy_seconds -= seconds - max(at - start, 0.0)
        if state == FRESH and start > at:
            self.tally.never_started(start - due)
        elif state == FRESH:
            state = STARTED
        self._given_back += 1  # keeps the order of messages that return at the same time
        heappush(self._again, (back, self._given_back, due, seconds, state))

    def _lose(self, at: float, free: list[float], waiting: list[float]) -> None:
        """Count the running, acked tasks as lost. While messages wait, every slot runs one."""
        runs = [end - at for end in free if end > at]
        self.tally.lost += len(free) if waiting else len(runs)
        self.tally.busy_seconds -= sum(runs) - sum(waiting)

    def _is_next(self, worker: int, at: float) -> bool:
        """Whether this worker promised to claim the next due message: it has waited longest."""
        self._let_wait(at)
        return bool(self._line) and self._line[0] == worker

    def _stall(self, worker: int, at: float, until: float) -> None:
        """Stop all claims until another worker polls or is notified."""
        period = max(self._poll_seconds, SHARED_POLL_SECONDS * len(self._free))
        period *= SOONEST_POLL + (1 - SOONEST_POLL) / len(self._free)
        for other in self._line:
            if other != worker:
                ago = max(at - self._claimed_at[other], 0.0)
                until = min(until, at + period - math.fmod(ago, period))
        self._now = max(self._now, until)

    def _replace(self, worker: int, at: float) -> None:
        self._free[worker] = [at] * len(self._free[worker])
        self._held[worker] = []
        self._away_until[worker] = at
        if worker in self._line:
            self._line.remove(worker)
        self._full[:] = [*(entry for entry in self._full if entry[1] != worker), (at, worker)]
        heapify(self._full)
