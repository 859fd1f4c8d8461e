"""Dead letters of all queues of an app."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from kombu_delayed.inspection.dead_letters import DeadLetters
from kombu_delayed.store.store import Store

from ..app.broker import Broker
from ..app.queues import Queues
from ..tasks.dead_task import DeadTask
from ..tasks.query import check_text, ids_of
from ..tasks.times import to_ms


class _Letters(DeadLetters):
    """The dead letters of a queue, over the connection that all calls share."""

    def __init__(self, broker: Broker, queue: str) -> None:
        super().__init__(broker.connection, queue)
        self._broker = broker

    @property
    def _store(self) -> Store:
        return self._broker.store


class Dead:
    """Lists, replays and purges dead letters, of one queue or of all."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues

    def _each(self, queue: str | None) -> Iterator[DeadLetters]:
        check_text("queue", queue)
        for name in [queue] if queue else self._queues.queues():
            yield _Letters(self._queues, name)

    def list(self, queue: str | None = None) -> Iterator[DeadTask]:
        """All dead letters, by queue, the oldest first, read lazily."""
        for letters in self._each(queue):
            for letter in letters:
                yield DeadTask(letters.queue, letter)

    def show(self, task_id: str, queue: str | None = None) -> DeadTask | None:
        """The dead letter of a task, or None."""
        (id,) = ids_of([task_id])
        for letters in self._each(queue):
            if (letter := letters.get(id)) is not None:
                return DeadTask(letters.queue, letter)
        return None

    def replay(
        self,
        ids: Iterable[str] | None = None,
        at: datetime | str | None = None,
        queue: str | None = None,
    ) -> int:
        """Replay some or all dead letters, now or at a time. Returns their number.

        Raises QueryError if `at` is not a time, or `queue` is empty.
        """
        if at is not None:
            to_ms("at", at)
        given = None if ids is None else ids_of(ids)
        return sum(letters.replay(given, at) for letters in self._each(queue))

    def purge(self, ids: Iterable[str] | None = None, queue: str | None = None) -> int:
        """Delete some or all dead letters. Returns their number. Raises QueryError as `replay`."""
        given = None if ids is None else ids_of(ids)
        return sum(letters.purge(given) for letters in self._each(queue))
