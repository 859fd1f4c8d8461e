"""What is known of a run beside the journals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tests.crash.crew import Life
from tests.crash.faults import Window
from tests.crash.history import Key
from tests.crash.journal import Line
from tests.crash.writing import SENDER

#: What becomes of a worker that does not end what it has begun.
DEATHS = frozenset({"killed", "main killed", "quit", "hung", "by itself"})

#: The kind of a window in which the server was slow with no fault.
STALL = "stall"
#: A server that takes longer than this to answer is held up, by a fault or by its machine.
STALL_SECONDS = 0.3


@dataclass
class Evidence:
    """What the harness has done, and what it has found on the server and in logs.

    `reclaims` are (time, pid of the dead consumer), `unrenewed` (time, pid of who could not renew
    its lease). `left` are messages that were on the server at the end, and in which keys;
    `held` what gates held when all had run: a key -> how much.
    """

    lives: Mapping[str, Life]
    windows: Sequence[Window]
    reclaims: Sequence[tuple[float, int]]
    unrenewed: Sequence[tuple[float, int]]
    lease_seconds: float
    left: Mapping[Key, list[str]]
    held: Mapping[str, int] = field(default_factory=dict)


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
