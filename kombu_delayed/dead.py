"""Dead letters of a connection's queues: look at them, give them another try, drop them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from kombu import Connection

from .message import eta_to_ms
from .store import CALL_LIMIT, DeadLetter, Store


class DeadLetters:
    """The dead letters of one queue.

    `connection` is one whose URL begins with `delayed+`; it is connected when it is needed.
    """

    def __init__(self, connection: Connection, queue: str) -> None:
        self._connection = connection
        self.queue = queue

    @property
    def _store(self) -> Store:
        store: Store = self._connection.default_channel.store
        return store

    def __len__(self) -> int:
        return self._store.dead_count(self.queue)

    def __iter__(self) -> Iterator[DeadLetter]:
        """All of them, the oldest first, fetched page by page."""
        start = 0
        while ids := self._store.dead_ids(self.queue, start, CALL_LIMIT):
            yield from self._store.dead_letters(self.queue, ids)
            start += len(ids)

    def get(self, id: str) -> DeadLetter | None:
        """The dead letter of a task id, or of an id as `DeadLetter` shows it."""
        found = self._store.dead_letters(self.queue, [id])
        return found[0] if found else None

    def replay(self, ids: Iterable[str] | None = None, at: datetime | str | None = None) -> int:
        """Give some, or all, another try, now or at a time; their deliveries are counted anew.

        `at` is a datetime or ISO 8601, UTC where it names no zone. Returns how many there were.
        """
        due_ms = 0 if at is None else eta_to_ms(at)
        return sum(self._store.replay(self.queue, page, due_ms) for page in self._pages(ids))

    def purge(self, ids: Iterable[str] | None = None) -> int:
        """Drop some, or all, for good; returns how many there were."""
        return sum(self._store.purge_dead(self.queue, page) for page in self._pages(ids))

    def _pages(self, ids: Iterable[str] | None) -> Iterator[list[str]]:
        if ids is not None:
            yield list(ids)
            return
        for _ in range(-(-len(self) // CALL_LIMIT)):
            yield self._store.dead_ids(self.queue, 0, CALL_LIMIT)
