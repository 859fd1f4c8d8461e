"""Checks and announces that there is something to claim, and describes the answer of a claim."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..connection.commands import numbers
from .calls.caller import Caller, without_errors
from .calls.scripts import Call
from .global_limits import Lack

#: How many bytes the answers have about that a consumer asks for at once. Each queue hands out one
#: message in any case.
ANSWER_BYTES = 2**20


class Delivered(NamedTuple):
    """The answer of a deliver: records (priority step + message) and when to come back.

    `next_due_ms` is when this consumer must claim again, because it has promised to, or because it
    has passed the promise on and makes sure that it is kept. Otherwise it is 0.
    """

    now_ms: int
    next_due_ms: int
    more: bool
    consumers: int
    records: Sequence[bytes]
    #: Whether messages wait at a gate, although the caller named no limits or turns.
    gated: bool = False
    #: Whether the policies declared for the queue differ from those of the caller.
    refused: bool = False
    #: Whether the queue is paused.
    paused: bool = False
    #: When the last pause of the queue ended, if that was within the last day; else 0.
    resumed_ms: int = 0
    #: Messages that wait for global limits.
    lacking: Sequence[Lack] = ()


class Claimable:
    """Tells whether there is something to claim in the queues of a store."""

    def __init__(self, store: Caller) -> None:
        self._store = store

    def announce(self, queue: str) -> None:
        """Put wake tokens for everything that can be claimed, now or later."""
        self._store.ask("announce", queue)

    def announce_all(self, queues: Sequence[str]) -> None:
        """`announce` each queue, in few round trips. Raises the first error."""
        self._store.all_of(self._store.call("announce", queue) for queue in queues)

    def announce_soon(self, queue: str) -> None:
        """`announce` without waiting for the answer. If it fails, consumers still poll."""
        self._store.post(*self._store.call("announce", queue), on_error=lambda: None)

    def look(self, parts: Sequence[Sequence[str]]) -> list[list[int]]:
        """For each queue of each part: 0 if there is something to claim, -1 if it is empty.

        Otherwise the ms until its next message is due, which a consumer has promised to claim.
        """
        return [*map(numbers, self._store.all_of(map(self._look_call, parts)))]

    def _look_call(self, queues: Sequence[str]) -> Call:
        keys = [*map(self._store.keys, queues)]
        names = [name for q in keys for name in (q.partitions, q.delayed, q.armed, *q.ready)]
        return self._store.call("look", queues[0], queues=names, lists=len(keys[0].ready))

    def count_keys(
        self, parts: Sequence[Sequence[tuple[str, bool]]], counted: Sequence[str]
    ) -> tuple[list[int], list[int]]:
        """For each part how many keys with messages exist, and how many consumers `counted` have.

        For each queue of a part, messages that are ready or wait at a gate count. Its backlog
        counts too if it is given with True.
        """
        commands = [("EXISTS", *self._signs(part)) for part in parts]
        commands += [("ZCARD", self._store.keys(queue).consumers) for queue in counted]
        answers = without_errors(self._store.run.many(commands))
        return answers[: len(parts)], answers[len(parts) :]

    def _signs(self, part: Sequence[tuple[str, bool]]) -> Iterator[str]:
        for queue, with_backlog in part:
            keys = self._store.keys(queue)
            yield from keys.ready
            yield keys.waiting
            if with_backlog:
                yield keys.partitions
