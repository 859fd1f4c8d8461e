"""Evidence about a run beside the journals, and the times in which it was calm."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.crash.clock import Readings
from tests.crash.crew import Life
from tests.crash.faults import Window
from tests.crash.history import NEVER, Execution, Key
from tests.crash.journal import SENDER, Line
from tests.crash.load import Plan
from tests.crash.schedule import SHORT

if TYPE_CHECKING:
    from celery_ext.tasks.history import TaskHistory
    from tests.crash.pings import Ping

#: The fates of a worker that does not end the work it has begun.
DEATHS = frozenset({"killed", "main killed", "quit", "hung", "by itself"})

#: During these a server may lose writes that it has acknowledged.
FAILOVERS = ("failover", "planned failover")
#: The kind of a window in which a single worker could not reach the server.
ALONE = "outage of one"
#: The kind of a window in which the server was slow with no fault.
STALL = "stall"
#: The kind of a window in which a worker was kept busy on purpose.
OCCUPIED = "occupied"
#: A server that takes longer than this to answer is held up, by a fault or by its machine.
STALL_SECONDS = 0.3

#: Anything lost with a connection is restored within this time.
RECOVERY_SECONDS = 1.5
#: How often a consumer polls on its own (`delayed_poll_seconds`), which heals other losses.
POLL_SECONDS = 5.0

#: Faults that no longer cause delays once the server has recovered from them.
_SHORT = SHORT | {STALL, OCCUPIED}
#: A worker that begins or ends: the machine has more to do meanwhile.
CHANGE = "worker begins or ends"
#: A worker that takes longer than this to begin or end is no excuse any more.
CHANGE_SECONDS = 20.0

#: How late the latest of a hundred tasks may be.
LATE_MS = 100.0
#: Steps with several hops may be delayed by this many times the lateness of the control task.
HOPS = 4


@dataclass
class Evidence:
    """The actions of the harness, and its findings on the server and in logs.

    `left` are messages that were on the server at the end, and in which keys. `held` are slots and
    messages at gates after all had run: a key -> how many. `leaked` are keys that should be gone.
    `ghosts` are descriptors that workers polled in vain, in two looks one after the other.
    `control` has when a task that no fault strikes was sent, and when it started.
    """

    lives: Mapping[str, Life]
    windows: Sequence[Window]
    lease_seconds: float
    left: Mapping[Key, list[str]]
    held: Mapping[str, int] = field(default_factory=dict)
    clock: Readings = field(default_factory=Readings)
    pings: Sequence[Ping] = ()
    leaked: Sequence[str] = ()
    ghosts: Sequence[str] = ()
    control: Sequence[tuple[float, float]] = ()
    #: The records of workers about tasks, by id, and when they were read; None if they were not.
    records: Mapping[str, TaskHistory] | None = None
    recorded_at: float = 0.0

    def cut_off(self, life: Life) -> Iterator[tuple[float, float]]:
        """When the worker alone could not reach the server, for longer than its lease may last."""
        for window in self.windows:
            alone = window.kind == ALONE and window.victim == life.name
            if alone and window.ended - window.began > self.shortest_lease:
                yield window.began, window.ended

    @property
    def shortest_lease(self) -> float:
        """The shortest time that a lease lasts from any moment: it is renewed each third."""
        return self.lease_seconds * 2 / 3


def stalls(lines: Iterable[Line]) -> Iterator[Window]:
    """When senders had to wait for the server."""
    began: dict[Key, float] = {}
    for line in sorted(lines, key=lambda line: line["at"]):
        key = line["id"], line["retries"]
        if line["owner"] == SENDER and line["event"] == "publish":
            began[key] = line["at"]
        elif line["owner"] == SENDER and line["event"] == "published" and key in began:
            since = began.pop(key)
            if line["at"] - since > STALL_SECONDS:
                yield Window(STALL, since, line["at"])


# Times of calm: outside of faults and of the recovery from them.


def recovered(window: Window, lease_seconds: float) -> float:
    """Until when a fault excuses a delay."""
    if window.kind in _SHORT or window.kind == CHANGE:
        return window.ended + RECOVERY_SECONDS
    return window.ended + RECOVERY_SECONDS + max(lease_seconds, POLL_SECONDS)


class Calm:
    """All the time without a fault or a recovery."""

    def __init__(self, windows: Iterable[Window], lease_seconds: float) -> None:
        self._spans: list[list[float]] = []
        for window in sorted(windows, key=lambda window: window.began):
            until = recovered(window, lease_seconds)
            if self._spans and window.began <= self._spans[-1][1]:
                self._spans[-1][1] = max(self._spans[-1][1], until)
            else:
                self._spans.append([window.began, until])
        self._began = [began for began, _ in self._spans]

    def covers(self, since: float, until: float) -> bool:
        """Whether it was calm all the time between two moments."""
        before = bisect_right(self._began, until)
        return before == 0 or self._spans[before - 1][1] < since


def changes(lives: Iterable[Life]) -> Iterator[Window]:
    """When workers began, until they were ready, and ended."""
    for life in lives:
        ready_at = min(life.ready_at, life.ended_at, life.started_at + CHANGE_SECONDS)
        yield Window(CHANGE, life.started_at, ready_at, life.name)
        if life.fated_at < NEVER:
            ended_at = min(life.ended_at, life.fated_at + CHANGE_SECONDS)
            yield Window(CHANGE, life.fated_at, ended_at, life.name)


def occupied(executions: Mapping[Key, Execution], plans: Sequence[Plan]) -> Iterator[Window]:
    """When workers were kept busy on purpose."""
    for plan in plans:
        execution = executions.get((plan.id, 0))
        for run in execution.runs if plan.seconds and execution else ():
            hold = next((hold for hold in execution.holds if hold.run is run), None)
            acked = hold.done if hold and run.late else NEVER
            ended = min(run.end, acked, run.start + plan.seconds)
            yield Window(OCCUPIED, run.start, ended, run.owner)


def percentile_99(values: Iterable[float]) -> float:
    found = sorted(values)
    return found[min(len(found) * 99 // 100, len(found) - 1)] if found else 0.0


def allowed_ms(control_ms: Iterable[float]) -> float:
    """How late the latest of a hundred tasks may be, given the lateness of the control task."""
    return max(LATE_MS, HOPS * percentile_99(control_ms))
