"""What is known of a run beside the journals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.crash.clock import Readings
from tests.crash.crew import Life
from tests.crash.faults import Window
from tests.crash.history import Key
from tests.crash.journal import Line
from tests.crash.writing import SENDER

if TYPE_CHECKING:
    from tests.crash.pings import Ping

#: What becomes of a worker that does not end what it has begun.
DEATHS = frozenset({"killed", "main killed", "quit", "hung", "by itself"})

#: The kind of a window in which one worker did not reach the server.
ALONE = "outage of one"
#: The kind of a window in which the server was slow with no fault.
STALL = "stall"
#: The kind of a window in which a worker was kept busy on purpose.
OCCUPIED = "occupied"
#: A server that takes longer than this to answer is held up, by a fault or by its machine.
STALL_SECONDS = 0.3


@dataclass
class Evidence:
    """What the harness has done, and what it has found on the server and in logs.

    `left` are messages that were on the server at the end, and in which keys; `held` what gates
    held when all had run: a key -> how much; `leaked` the keys that ought not to be there.
    `ghosts` are what workers polled in vain, in two looks one after the other.
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

    def cut_off(self, life: Life) -> Iterator[tuple[float, float]]:
        """When it alone did not reach the server, for longer than its lease may last."""
        for window in self.windows:
            alone = window.kind == ALONE and window.victim == life.name
            if alone and window.ended - window.began > self.shortest_lease:
                yield window.began, window.ended

    @property
    def shortest_lease(self) -> float:
        """It is renewed each third: so long it lasts at least from any moment on."""
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
