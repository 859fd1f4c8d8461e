"""Changes every copy of a delayed message, in whichever shard of its queue it is.

A message is in another shard than its id says when the number of shards has changed since it was
sent, or when the node of its own shard was down.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..connection.commands import numbers
from ..connection.native import get_logger
from ..errors import UNREACHABLE
from ..store.calls.scripts import Call
from ..store.store import Store, chunks
from .backlog import Backlog, Move, Waiting, waiting_in

logger = get_logger(__name__)


class Copies:
    """The backlogs of all shards of one queue. An id stands for all its messages in all of them.

    All shards are asked at once, in one round trip to each node. If one cannot be reached, its
    error is raised unless each id was found in another one.
    """

    def __init__(self, store: Store, shards: Sequence[str]) -> None:
        self._store = store
        self._backlogs = [Backlog(store, shard) for shard in shards]

    def cancel(self, ids: Sequence[str]) -> list[int]:
        """Drop messages. Returns how many there were, for each id."""
        if len(self._backlogs) == 1:
            return self._backlogs[0].cancel(ids)
        counts: list[int] = []
        for part in chunks(list(ids)):
            calls = [self._store.cancel_call(each.queue, part) for each in self._backlogs]
            counts += self._counts(calls, len(part))
        return counts

    def reschedule(self, moves: Sequence[Move]) -> list[int]:
        """Give messages another due time. Returns how many there were, for each move."""
        if len(self._backlogs) == 1:
            return self._backlogs[0].reschedule(moves)
        counts: list[int] = []
        for part in chunks(list(moves)):
            calls = [each.reschedule_call(part) for each in self._backlogs]
            counts += self._counts(calls, len(part))
        return counts

    def take(self, ids: Sequence[str]) -> Iterator[tuple[str, Waiting]]:
        """Drop messages and return them, each with its shard."""
        if len(self._backlogs) == 1:
            (backlog,) = self._backlogs
            yield from ((backlog.queue, each) for each in backlog.take(ids))
            return
        for part in chunks(list(ids)):
            calls = [self._store.cancel_call(each.queue, part, "read") for each in self._backlogs]
            answers, error = self._ask(calls)
            missing = set(part)
            for backlog, answer in zip(self._backlogs, answers, strict=True):
                for waiting in waiting_in(self._store, backlog.queue, answer or ()):
                    missing.discard(waiting.id)
                    yield backlog.queue, waiting
            _check(error, bool(missing))

    def _counts(self, calls: Sequence[Call], size: int) -> list[int]:
        answers, error = self._ask(calls)
        each = [numbers(answer) for answer in answers if answer is not None]
        found = [sum(counts) for counts in zip([0] * size, *each, strict=True)]
        _check(error, 0 in found)
        return found

    def _ask(self, calls: Sequence[Call]) -> tuple[list[Any], Exception | None]:
        """Return each shard's answer, None if its node cannot be reached, and that error."""
        answers = self._store.together(calls)
        failed = next((each for each in answers if isinstance(each, Exception)), None)
        if failed is not None and not isinstance(failed, UNREACHABLE):
            raise failed
        return [None if isinstance(each, Exception) else each for each in answers], failed


def _check(error: Exception | None, is_missing: bool) -> None:
    if error is not None and is_missing:
        raise error
    if error is not None:
        logger.warning("Not all shards of the queue could be searched: %s", error)
