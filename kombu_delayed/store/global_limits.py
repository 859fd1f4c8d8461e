"""Limits that apply to several queues. Consumers borrow their slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import quote

from .calls.caller import Caller
from .calls.scripts import Call

_POOL = "kombu-delayed-limit:"

#: Prefix of the names of global limits, so that no limit of a queue has the same name.
GLOBAL = "global/"


def pool_of(limit: str) -> str:
    """The pool with the slots of a limit: its keys are like those of a queue with this name."""
    return _POOL + limit


def is_pool(queue: str) -> bool:
    """Whether the name is not a queue but the pool of a limit."""
    return queue.startswith(_POOL)


def is_global(slot: str) -> bool:
    """Whether a limit and key, in the form of a queue's gate, belong to a global limit."""
    return slot.startswith(quote(GLOBAL, safe=""))


class Lack(NamedTuple):
    """Messages that wait for a global limit, by its name and key. There are at least `messages`."""

    slot: str
    cost: int
    messages: int


@dataclass
class Shared:
    """The slots that a consumer got, for messages by queue and slot, and the queues to call."""

    granted: dict[tuple[str, str], int] = field(default_factory=dict)
    called: list[str] = field(default_factory=list)


def text_of(slots: Mapping[str, int]) -> str:
    """Slots in the form that scripts take."""
    return "".join(f"{name} {count};" for name, count in slots.items() if count > 0)


class GlobalLimits:
    """The slots of the global limits of a database."""

    def __init__(self, store: Caller) -> None:
        self._store = store

    def share_call(
        self,
        pool: str,
        consumer: str,
        number: int,
        limit: str,
        held: Mapping[str, int],
        wanted: Mapping[str, Sequence[Lack]],
        *,
        most: int,
        lease_ms: int,
        leased: bool,
    ) -> Call:
        """The script that lends slots, and its arguments; `shared` reads its answer.

        `held` lists all slots that the consumer has now, `wanted` the messages that wait for slots,
        by queue. The consumer gets slots for at most `most` messages. `limit` has the numbers of
        the limit, from its gate.
        """
        parts = [part for queue in wanted for lack in wanted[queue] for part in (queue, *lack)]
        return self._store.call(
            "share",
            pool,
            consumer,
            number=number,
            limits=limit,
            held=text_of(held),
            wanted=parts,
            most=most,
            lease_ms=lease_ms,
            leased=int(leased),
        )

    def call(self, queue: str) -> None:
        """Call a consumer of a queue, so that it claims. Does not wait for the answer."""
        self._store.post(*self._store.call("call", queue), on_error=lambda: None)


def shared(answer: Any) -> Shared | None:
    """Read the answer of the script that lends slots; None if the caller has lost its lease."""
    if len(answer) == 1:
        return None
    _, granted, called = answer
    each = zip(granted[::3], granted[1::3], granted[2::3], strict=True)
    return Shared(
        {(_text(queue), slot.decode()): int(count) for queue, slot, count in each},
        [*map(_text, called)],
    )


def lacks(found: Sequence[Any]) -> list[Lack]:
    """Read the part of a claim's answer about messages that wait for global limits."""
    each = zip(found[::3], found[1::3], found[2::3], strict=True)
    return [Lack(slot.decode(), int(cost), int(count)) for slot, cost, count in each]


def _text(name: bytes) -> str:
    return name.decode(errors="surrogateescape")
