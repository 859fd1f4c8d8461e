"""Messages that were handed out and that their program has not begun, which can still go back."""

from __future__ import annotations

from collections.abc import Callable, Iterator


class Reserved:
    """The reserved messages of a channel, as Celery calls them, whose programs say when they begin.

    `queue_of` gives the queue of a message that was handed out and is held.
    """

    def __init__(self, queue_of: Callable[[int], str | None]) -> None:
        self.tags: set[int] = set()
        #: The one that is being handed to its program just now, and whether it has gone back.
        self.in_hand: int | None = None
        self._has_gone = False
        #: Queues whose programs say when they begin.
        self._say_when: set[str] = set()
        self._queue_of = queue_of

    def hand(self, tag: int) -> None:
        """A message is handed to its program, which may say that it does not begin yet."""
        self.in_hand, self._has_gone = tag, False

    def add(self, tag: int) -> None:
        """The program calls `begin` before it begins on a message: until then it can go back."""
        if not (tag == self.in_hand and self._has_gone):
            self.tags.add(tag)
        if (queue := self._queue_of(tag)) is not None:
            self._say_when.add(queue)
        self.in_hand = None

    def begin(self, tag: int) -> bool:
        """Whether the program may begin on a message that waits: it has not gone back."""
        try:
            self.tags.remove(tag)  # whichever thread does it decides
        except KeyError:
            return False
        return True

    def take(self, only: str | None = None) -> Iterator[tuple[int, str]]:
        """Take those of all queues, or of one, from their program: tags and queues, last first."""
        for tag in sorted(self.tags, reverse=True):
            queue = self._queue_of(tag)
            if queue is not None and only in (None, queue) and self.begin(tag):
                yield tag, queue

    def take_of(self, queue: str) -> Iterator[tuple[int, str]]:
        """Take those of one queue, and the one that is being handed to its program."""
        if (tag := self.in_hand) is not None and queue in self._say_when:
            self._has_gone = self._queue_of(tag) == queue
            if self._has_gone:
                self.tags.add(tag)
        return self.take(queue)
