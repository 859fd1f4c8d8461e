"""The dead letters of a connection's queues: list, replay and purge them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from datetime import datetime
from operator import attrgetter

from kombu import Connection

from ..message.envelope import eta_to_ms
from ..store.dead_letters import DeadLetter
from ..store.store import CALL_LIMIT, Store


class DeadLetters:
    """The dead letters of one queue.

    `connection` has a URL that begins with `delayed+`; it connects when needed.
    """

    def __init__(self, connection: Connection, queue: str) -> None:
        self._connection = connection
        self.queue = queue

    @property
    def _store(self) -> Store:
        store: Store = self._connection.default_channel.store
        return store

    @property
    def _shards(self) -> tuple[str, ...]:
        return self._store.shards.all(self.queue)

    def __len__(self) -> int:
        return sum(map(self._store.dead.count, self._shards))

    def __iter__(self) -> Iterator[DeadLetter]:
        """All of them, the oldest first, fetched page by page.

        None is skipped if others are replayed or purged meanwhile.
        """
        return heapq.merge(*map(self._letters_of, self._shards), key=attrgetter("at_ms"))

    def get(self, id: str) -> DeadLetter | None:
        """The dead letter of a task id, or of an id as `DeadLetter` shows it."""
        found = (self._store.dead.letters(shard, [id]) for shard in self._shards)
        return next((letter for letters in found for letter in letters), None)

    def replay(self, ids: Iterable[str] | None = None, at: datetime | str | None = None) -> int:
        """Replay some or all dead letters, now or at a time, with deliveries counted from zero.

        `at` is a datetime or ISO 8601 (UTC without a zone). Returns the number of replayed letters.
        """
        due_ms = 0 if at is None else eta_to_ms(at)
        return sum(self._store.dead.replay(*page, due_ms) for page in self._pages(ids))

    def purge(self, ids: Iterable[str] | None = None) -> int:
        """Delete some or all dead letters. Returns their number."""
        return sum(self._store.dead.purge(*page) for page in self._pages(ids))

    def _letters_of(self, shard: str) -> Iterator[DeadLetter]:
        for _, ids in self._pages_of(shard):
            yield from self._store.dead.letters(shard, ids)

    def _pages(self, ids: Iterable[str] | None) -> Iterator[tuple[str, list[str]]]:
        given = None if ids is None else list(ids)
        for shard in self._shards:
            if given is None:
                yield from self._pages_of(shard)
            else:
                yield shard, given

    def _pages_of(self, shard: str) -> Iterator[tuple[str, list[str]]]:
        """Yield pages of as many letters as there are now, so one that fails again comes once."""
        dead, after = self._store.dead, None
        left = dead.count(shard)
        while left > 0 and (page := dead.page(shard, after, min(left, CALL_LIMIT))):
            yield shard, [id for _, id in page]
            after = page[-1]
            left -= len(page)
