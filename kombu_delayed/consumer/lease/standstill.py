"""Notices a stuck loop, and gives up the messages that it has claimed and not started."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from ...connection import native
from ...errors import UNREACHABLE
from ...store.store import Store, chunks

logger = native.get_logger(__name__)


class Unbegun(NamedTuple):
    """A message that was claimed, and that its program has not started."""

    queue: str
    tag: int
    has_slots: bool = False


class Progress:
    """Watches one loop. The loop stamps it; the keeper's thread checks it.

    `take_back` takes messages that have not started away from the loop, so that this object owns
    them; `report` gives back their slots of global limits; `queues` returns the consumed queues.
    """

    def __init__(
        self,
        seconds: float,
        clock: Callable[[], float],
        take_back: Callable[[], list[Unbegun]],
        report: Callable[[Store, str, int], None],
        queues: Callable[[], Iterable[str]],
    ) -> None:
        self._seconds = seconds
        self._clock = clock
        self._take_back = take_back
        self._report = report
        self._queues = queues
        self._at = clock()
        self._has_stopped = False
        self._left: list[Unbegun] = []
        self._owes_promises = False
        #: On a Cluster a thread for each node checks.
        self._lock = native.lock()

    @property
    def taken(self) -> list[int]:
        """The tags of messages that were taken back, and that the server still has to learn of."""
        return [each.tag for each in self._left]

    def stamp(self) -> None:
        """Note that the loop is running."""
        self._at = self._clock()

    def waits(self, seconds: float) -> None:
        """Note that the loop waits for messages, at most for `seconds`."""
        self._at = self._clock() + seconds

    def check(self, store: Store, consumer: str) -> None:
        """Give up messages that have not started if the loop has been stuck for a whole lease.

        Messages that could not be given back are sent with the next check. Raises redis-py's
        connection errors.
        """
        if not self._lock.acquire(False):
            return
        try:
            self._check(store, consumer)
        finally:
            self._lock.release()

    def _check(self, store: Store, consumer: str) -> None:
        has_stopped = self._clock() - self._at >= self._seconds
        is_new, self._has_stopped = has_stopped and not self._has_stopped, has_stopped
        if is_new:
            self._left += self._take_back()
            if self._left:
                logger.warning(
                    "The event loop of consumer %s has been stuck for %g s: other consumers get %d"
                    " messages that it has claimed and not started",
                    consumer,
                    self._seconds,
                    len(self._left),
                )
            self._owes_promises = True
        errors = self._release(store, consumer)
        if has_stopped and not errors:
            self._report(store, consumer, int(self._seconds * 1000))
        if self._owes_promises:
            self._pass_promises_on(store)
            self._owes_promises = False
        if errors:
            raise errors[0]

    def forget(self) -> None:
        """Forget what was taken back, because others have all claimed messages now."""
        self._left = []

    def _release(self, store: Store, consumer: str) -> list[BaseException]:
        """Release what was taken back; returns the errors of queues whose node is unreachable."""
        left, errors = self._left, []
        for queue in {each.queue for each in left}:
            mine = [each for each in left if each.queue == queue]
            try:
                self._release_of(queue, mine, store, consumer)
            except UNREACHABLE as error:
                errors.append(error)
        return errors

    def _release_of(self, queue: str, mine: list[Unbegun], store: Store, consumer: str) -> None:
        store.release(queue, consumer, [each.tag for each in mine])
        if slots := [each.tag for each in mine if each.has_slots]:
            for some in chunks(slots):
                store.free(queue, consumer, some, on_error=lambda: None)
            store.run.settle()
        self._left = [each for each in self._left if each.queue != queue]

    def _pass_promises_on(self, store: Store) -> None:
        # The first token may go to the stuck loop itself, because it waits for one.
        for _ in range(2):
            store.claimable.announce_all([*self._queues()])
