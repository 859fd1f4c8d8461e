"""The backlog of a fake store."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

from ..backlog import NEVER_MS, PAGE_SIZE, Move, Waiting
from ..keys import step_char
from ..message import Kept
from ..store import CALL_LIMIT
from .fake import FakeStore
from .fake_queue import FakeQueue, in_bytes, with_due_ms

#: The first eta of a message, if it is text.
_ETA = re.compile(rb'((?:(?!"eta": ?).)*"eta": ?)"[^"\\]*"', re.DOTALL)


class FakeBacklog:
    """The backlog of one queue; every method is as that of `kombu_delayed.backlog.Backlog`."""

    def __init__(self, store: FakeStore, queue: str) -> None:
        self.store = store
        self.queue = queue

    @property
    def _queue(self) -> FakeQueue:
        return self.store.queue(self.queue)

    def get(self, id: str) -> list[Waiting]:
        """The messages with a task id, of which there may be several."""
        with self.store.lock:
            q = self._queue
            members = [member for member in q.members_of(id) if member in q.delayed]
            return [Waiting(member, q.delayed[member]) for member in members]

    def pages(
        self,
        due_after_ms: int = 0,
        due_before_ms: int = NEVER_MS,
        needle: str = "",
        size: int | None = None,
    ) -> Iterator[list[Waiting]]:
        """All messages due in `[due_after_ms, due_before_ms)`, by due time, a bounded page a call.

        Only those with `needle` in their text, if one is given. `size` is how many messages a call
        looks at.
        """
        limit = size or PAGE_SIZE
        last = (due_after_ms, b"")
        while True:
            found = [Waiting(*item) for item in self._queue_in_order()]
            # An id is never empty, so that nothing due at the first instant is passed over.
            page = [each for each in found if last < _place(each) < (due_before_ms, b"")]
            page = page[:limit]
            yield [each for each in page if needle.encode() in _record(each.kept)]
            if len(page) < limit:
                return
            last = _place(page[-1])

    def _queue_in_order(self) -> list[tuple[str, Kept]]:
        with self.store.lock:
            return self._queue.in_order()

    def take(self, ids: Iterable[str]) -> Iterator[Waiting]:
        """Drop the messages with these task ids, and return them."""
        for id in ids:
            with self.store.lock:
                found = self.get(id)
                for each in found:
                    self._queue.take(each.member)
            yield from reversed(found)

    def cancel(self, ids: Iterable[str], *, members: bool = False) -> list[int]:
        """Drop messages; returns how many there were, for each id.

        An id stands for all messages that share it; with `members`, a `Waiting.member` for one.
        """
        with self.store.lock:
            q = self._queue
            return [sum(q.take(m) is not None for m in self._meant(id, members)) for id in ids]

    def _meant(self, id: str, members: bool) -> list[str]:
        return [id] if members else self._queue.members_of(id)

    def reschedule(self, moves: Iterable[Move], *, members: bool = False) -> list[int]:
        """Give messages another due time; returns how many there were, for each.

        A time that has come makes them ready. `members` is as for `cancel`.
        """
        counts, later = [], []
        with self.store.lock:
            q, now_ms = self._queue, self.store.now_ms
            before = q.earliest
            for move in moves:
                due_ms = int(move.due) + (now_ms if move.due.startswith("+") else 0)
                meant = [m for m in self._meant(move.id, members) if m in q.delayed]
                for member in reversed(meant):
                    self._move(member, due_ms, move.eta, now_ms)
                if meant and due_ms > now_ms:
                    later.append(due_ms)
                counts.append(len(meant))
            q.announce_due(min(later, default=None), before)
        return counts

    def _move(self, member: str, due_ms: int, eta: str, now_ms: int) -> None:
        q = self._queue
        kept = q.delayed[member]
        message = _with_eta(kept.message, eta)
        if due_ms <= now_ms:
            q.take(member)
            q.list_for(kept.step).append(with_due_ms(message, due_ms))
            q.announce_ready()
        else:
            q.delayed[member] = Kept(kept.step, due_ms, message)

    def forecast(self, edges_ms: Sequence[int]) -> list[int]:
        """How many are due before the first edge, from each edge to the next, and after the last.

        Raises ValueError where the edges are too many or not in ascending order.
        """
        if len(edges_ms) > CALL_LIMIT or list(edges_ms) != sorted(edges_ms):
            raise ValueError(f"a forecast takes at most {CALL_LIMIT} edges, in ascending order")
        counts = [0] * (len(edges_ms) + 1)
        for _, kept in self._queue_in_order():
            counts[bisect_right(edges_ms, kept.due_ms)] += 1
        return counts


def _place(each: Waiting) -> tuple[int, bytes]:
    return each.kept.due_ms, in_bytes(each.member)


def _record(kept: Kept) -> bytes:
    return f"{step_char(kept.step)}{kept.due_ms}".encode() + kept.message


def _with_eta(message: bytes, eta: str) -> bytes:
    if not eta:
        return message
    found = _ETA.match(message)
    return found[1] + b'"' + eta.encode() + b'"' + message[found.end() :] if found else message
