"""Whether there is something to claim, told to consumers; and what a claim has answered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..connection.commands import numbers
from .calls.caller import Caller, without_errors
from .calls.scripts import Call
from .global_limits import Lack


class Delivered(NamedTuple):
    """The answer of a deliver: records (priority step + message) and when to come back.

    `next_due_ms` is 0 unless this consumer shall claim then: it has promised to, or it has passed
    the promise on and looks after it.
    """

    now_ms: int
    next_due_ms: int
    more: bool
    consumers: int
    records: Sequence[bytes]
    #: Whether messages wait at a gate, but the caller named no limits or turns.
    gated: bool = False
    #: Whether other policies are declared for the queue than the caller goes by.
    refused: bool = False
    #: Whether the queue is paused.
    paused: bool = False
    #: Since when the queue goes on, where it was paused within the last day.
    resumed_ms: int = 0
    #: Messages that wait for global limits.
    lacking: Sequence[Lack] = ()


class Claimable:
    """What there is to claim in the queues of a store."""

    def __init__(self, store: Caller) -> None:
        self._store = store

    def announce(self, queue: str) -> None:
        """Put wake tokens for all that can be claimed, now or later."""
        self._store.ask("announce", queue)

    def announce_all(self, queues: Sequence[str]) -> None:
        """As `announce` on each queue, in few round trips. Raises the first error."""
        self._store.all_of(self._store.call("announce", queue) for queue in queues)

    def announce_soon(self, queue: str) -> None:
        """As `announce`, without waiting for the answer; where it fails, others look themselves."""
        self._store.post(*self._store.call("announce", queue), on_error=lambda: None)

    def look(self, parts: Sequence[Sequence[str]]) -> list[list[int]]:
        """For each queue of each part 0 where there is something to claim, or -1 for nothing.

        Else in how many ms its next message is due, for which a consumer has promised to come.
        """
        return [*map(numbers, self._store.all_of(map(self._look_call, parts)))]

    def _look_call(self, queues: Sequence[str]) -> Call:
        keys = [*map(self._store.keys, queues)]
        names = [name for q in keys for name in (q.partitions, q.delayed, q.armed, *q.ready)]
        return self._store.call("look", queues[0], queues=names, lists=len(keys[0].ready))

    def count_keys(
        self, parts: Sequence[Sequence[tuple[str, bool]]], counted: Sequence[str]
    ) -> tuple[list[int], list[int]]:
        """How many keys say that there are messages in queues, and how many consumers some have.

        Of each queue in a part what is ready or waits at a gate counts, and its backlog if True.
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
