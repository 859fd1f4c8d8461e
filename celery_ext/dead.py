"""Dead letters of all queues of an app."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from kombu import Connection

from kombu_delayed.dead import DeadLetters
from kombu_delayed.store import DeadLetter

from .task_info import TaskInfo


@dataclass(frozen=True)
class DeadTask:
    """A task that was buried, with the reason; `letter` has its message."""

    queue: str
    letter: DeadLetter

    @property
    def info(self) -> TaskInfo:
        """What is known of the task."""
        letter = self.letter
        return TaskInfo(
            "dead",
            self.queue,
            0,
            letter.message,
            consumer=letter.consumer,
            reason=letter.reason,
            member=letter.id,
        )

    @property
    def at(self) -> datetime:
        """When it was buried, in UTC."""
        epoch = datetime.fromtimestamp(0, timezone.utc)
        return epoch + timedelta(milliseconds=self.letter.at_ms)


class Dead:
    """Look at dead letters, give them another try, drop them; in one queue or in all."""

    def __init__(self, connection: Connection, queues: Callable[[], list[str]]) -> None:
        self._connection = connection
        self._queues = queues

    def _each(self, queue: str | None) -> Iterator[DeadLetters]:
        for name in [queue] if queue else self._queues():
            yield DeadLetters(self._connection, name)

    def list(self, queue: str | None = None) -> Iterator[DeadTask]:
        """All of them, by queue, the oldest first, as they are read."""
        for letters in self._each(queue):
            for letter in letters:
                yield DeadTask(letters.queue, letter)

    def show(self, task_id: str, queue: str | None = None) -> DeadTask | None:
        """The dead letter of a task; None: there is none."""
        for letters in self._each(queue):
            if (letter := letters.get(task_id)) is not None:
                return DeadTask(letters.queue, letter)
        return None

    def replay(
        self,
        ids: Iterable[str] | None = None,
        at: datetime | str | None = None,
        queue: str | None = None,
    ) -> int:
        """Give some, or all, another try, now or at a time; returns how many there were."""
        given = None if ids is None else [*ids]
        return sum(letters.replay(given, at) for letters in self._each(queue))

    def purge(self, ids: Iterable[str] | None = None, queue: str | None = None) -> int:
        """Drop some, or all, for good; returns how many there were."""
        given = None if ids is None else [*ids]
        return sum(letters.purge(given) for letters in self._each(queue))
