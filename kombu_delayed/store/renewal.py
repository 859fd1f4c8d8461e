"""What a look at the leases of some queues has found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Other(NamedTuple):
    """A lease of another consumer that has ended by the server's clock, or ends too late."""

    queue: str
    consumer: str
    end_ms: float


@dataclass
class Renewal:
    """All times are milliseconds of the server's clock. None: there is no such lease."""

    now_ms: int = 0
    #: When the first of the caller's own leases was to end.
    own_end_ms: int | None = None
    #: When the first lease of others ends.
    next_end_ms: int | None = None
    #: Queues in which the caller's lease was lost.
    lost: list[str] = field(default_factory=list)
    #: Queues in which it was renewed and holds nothing.
    idle: set[str] = field(default_factory=set)
    #: Queues that could not be asked.
    failed: list[str] = field(default_factory=list)
    others: list[Other] = field(default_factory=list)

    def add(self, queues: Sequence[str], answer: Any) -> None:
        """What the script has said of some queues; None: they could not be asked."""
        if answer is None:
            self.failed.extend(queues)
            return
        now_ms, own_ms, next_ms, lost, idle, odd = answer
        self.now_ms = max(self.now_ms, now_ms)
        self.own_end_ms = _earlier(self.own_end_ms, own_ms)
        self.next_end_ms = _earlier(self.next_end_ms, next_ms)
        self.lost.extend(queues[n - 1] for n in lost)
        self.idle.update(queues[n - 1] for n in idle)
        for n, name, end_ms in zip(odd[::3], odd[1::3], odd[2::3], strict=True):
            consumer = name.decode(errors="surrogateescape")
            self.others.append(Other(queues[n - 1], consumer, float(end_ms)))


def merged(answers: Iterable[tuple[Sequence[str], Any]]) -> Renewal:
    """What several calls have said, each of its own queues."""
    renewal = Renewal()
    for queues, answer in answers:
        renewal.add(queues, answer)
    return renewal


def _earlier(known_ms: int | None, found_ms: int) -> int | None:
    if not found_ms:
        return known_ms
    return found_ms if known_ms is None else min(known_ms, found_ms)
