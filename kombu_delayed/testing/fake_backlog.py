"""The backlog of a fake store."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

from ..backlog import NEVER_MS, PAGE_SIZE, Move, Place, Waiting
from ..keys import step_char
from ..message import Kept
from ..store import CALL_LIMIT
from ..waits import without_wait
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
        place: Place | None = None
        while True:
            found, place = self.page(place, due_after_ms, due_before_ms, needle, size)
            yield found
            if place is None:
                return

    def page(
        self,
        after: Place | None = None,
        due_after_ms: int = 0,
        due_before_ms: int = NEVER_MS,
        needle: str = "",
        size: int | None = None,
    ) -> tuple[list[Waiting], Place | None]:
        """One page, as of `pages`, and where the next one begins; None: this was the last."""
        limit = size or PAGE_SIZE
        # An id is never empty, so that nothing due at the first instant is passed over.
        last = after or (due_after_ms, b"")
        found = [Waiting(*item) for item in self._queue_in_order()]
        page = [each for each in found if last < _place(each) < (due_before_ms, b"")][:limit]
        meant = [each for each in page if needle.encode() in _record(each.kept)]
        return meant, Place(*_place(page[-1])) if len(page) == limit else None

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
                    message = _with_eta(without_wait(q.delayed[member].message), move.eta)
                    self._move(member, due_ms, message, now_ms)
                if meant and due_ms > now_ms:
                    later.append(due_ms)
                counts.append(len(meant))
            q.announce_due(min(later, default=None), before)
        return counts

    def _move(self, member: str, due_ms: int, message: bytes, now_ms: int) -> None:
        q = self._queue
        step = q.delayed[member].step
        if due_ms <= now_ms:
            q.take(member)
            q.list_for(step).append(with_due_ms(message, due_ms))
            q.announce_ready()
        else:
            q.keep(member, Kept(step, due_ms, message))

    def revise(self, waiting: Waiting, step: int, message: bytes, due_ms: int) -> bool:
        """Give a message another text, priority step and due time.

        A time that has come makes it ready. False: it is not delayed any more, or has been changed
        since it was read.
        """
        with self.store.lock:
            q = self._queue
            if q.delayed.get(waiting.member) != waiting.kept:
                return False
            before = q.earliest
            q.delayed[waiting.member] = Kept(step, due_ms, message)
            is_later = due_ms > self.store.now_ms
            self._move(waiting.member, due_ms, message, self.store.now_ms)
            q.announce_due(due_ms if is_later else None, before)
            return True

    def reason(self, member: str) -> str | None:
        """Nothing waits for its turn here."""
        return None

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
