"""What the moves take and return."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from ..message.ticket import Gate
from .keys import step_char

T = TypeVar("T")

#: Messages in one call of a script: a call stays below a few milliseconds, and below Lua's stack.
CALL_LIMIT = 250


class UniqueOutcome(NamedTuple):
    """What became of a message with a unique key, and of the one that was delayed with that key.

    `done` is "stored", "refused", "replaced" or "pushed", `other` the other one's name in the
    backlog, or "". `state` is what the message is now: "delayed", "ready", or "already" where it
    was not stored. It is, or was to be, due at `due_ms`. `replaced` is the record of the one whose
    place it took, or empty.
    """

    done: str
    other: str
    state: str
    due_ms: int
    replaced: bytes


class Scheduled(NamedTuple):
    """How many messages went where: into the backlog, to ready at once, or were there already."""

    delayed: int
    ready: int
    already: int


class Size(NamedTuple):
    """A queue's messages by state; `due` are those of `delayed` whose time has come."""

    ready: int
    due: int
    delayed: int


class Limits(NamedTuple):
    """When a message counts as poison (0: never), and how many dead letters are kept how long."""

    max_deliveries: int = 20
    dead_limit: int = 100_000
    dead_seconds: float = 90 * 86_400


@dataclass(frozen=True)
class Delivered:
    """The answer of a deliver: records (priority step + message) and when to come back.

    `next_due_ms` is 0 unless this consumer is the one that shall claim then.
    """

    now_ms: int
    next_due_ms: int
    more: bool
    consumers: int
    records: Sequence[bytes]
    #: Whether messages wait at a gate, where the caller goes by none.
    gated: bool = False


class Entry(NamedTuple):
    """One message on its way into a queue.

    `due` is milliseconds since the epoch, or `+` and milliseconds from the server's now.
    """

    id: str
    step: int
    message: str
    due: str = ""

    @property
    def record(self) -> str:
        """The form in which Redis keeps it, but in the backlog."""
        return step_char(self.step) + self.message

    @property
    def kept(self) -> str:
        """The form in which the backlog keeps it, as far as the due time is known."""
        due = "" if self.due.startswith("+") else self.due
        return f"{step_char(self.step)}{due}{self.message}"


def delivered(answer: Any, gate: Gate | None) -> Delivered | None:
    """What the script that delivers has answered; None: the caller's lease was lost."""
    if len(answer) == 1:
        return None
    now_ms, next_due_ms, more, consumers, *records = answer
    has_more = bool(more % 2) or (gate is None and more > 1)
    return Delivered(now_ms, next_due_ms, has_more, consumers, records, more > 1)


def chunks(entries: Sequence[T], limit: int | None = None) -> Iterable[Sequence[T]]:
    size = limit or CALL_LIMIT
    if 0 < len(entries) <= size:
        return (entries,)
    return (entries[at : at + size] for at in range(0, len(entries), size))
