"""Reports the end of a task that keeps its unique key until then."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from celery import Celery
from celery.exceptions import Reject, Retry
from celery.utils.log import get_logger

from kombu_delayed.consumer.outbox import Held
from kombu_delayed.message.envelope import FINISHED, UNTIL_HEADER, escaped
from kombu_delayed.store.calls.shards import queue_of

from ...app.broker import own_broker
from ...errors import BROKER_FAILS
from ...tasks.times import ms_until

logger = get_logger(__name__)

#: How long after its start a task that was acked early keeps its key, and how much longer than its
#: hard time limit if it has one. If its process is killed, nobody reports the end.
LONGEST_MS, MARGIN_MS = 24 * 3_600_000, 60_000

#: How long after its due time a task keeps its key until it starts; HELD_MS in unique.lua.
WAITING_MS = 30 * 24 * 3_600_000


class UniqueHold:
    """The unique key of a task that was received."""

    def __init__(self, app: Celery, message: Any, shard: str) -> None:
        channel, headers = message.channel, message.headers
        self._app, self._channel = app, channel
        key, id = escaped(str(headers["delayed_unique"])), escaped(str(headers["id"]))
        home = channel.store.shards.home(queue_of(shard), key)
        self._of: Callable[[int], Held] = lambda ms: Held(home, key, id, ms)

    @classmethod
    def of(cls, app: Celery, message: Any, shard: str) -> UniqueHold | None:
        """The key of a message, or None if it has none or came from another transport."""
        headers = message.headers
        if headers.get(UNTIL_HEADER) != FINISHED or not {"delayed_unique", "id"} <= headers.keys():
            return None
        return cls(app, message, shard) if hasattr(message.channel, "handed_out") else None

    def begins(self, limit_seconds: float | None) -> None:
        """Keep the key for a limited time, because the message is about to be acked."""
        limit = limit_seconds or inf
        self._set(self._of(int(limit * 1000) + MARGIN_MS if limit < inf else LONGEST_MS))

    def waits(self, until: Any) -> None:
        """Keep the key for a retry that is due then, or in these seconds.

        The shorter time of `begins` may reach the server after the retry has.
        """
        held = self._of(max(ms_until(until), 0) + WAITING_MS)
        self._set(held._replace(goes_on=True))

    def goes_on(self, until: Any, queue: str | None, acks_late: bool) -> None:
        """Keep the key for a retry; release it if the retry holds it in another queue instead."""
        if queue is not None and queue != self._of(0).queue:
            self._set(self._of(0))
        elif not acks_late:
            self.waits(until)

    def ended(self, error: BaseException | None = None, acks_late: bool = True) -> None:
        """Release the key after an error or success, but not before a retry. Safe to call twice."""
        returns = isinstance(error, Reject) and error.requeue and acks_late
        if returns or isinstance(error, Retry):
            return
        self._set(self._of(0))

    def _set(self, held: Held) -> None:
        if not self._channel.closed:
            self._channel.handed_out.hold(held)
            return
        try:  # its worker has reconnected meanwhile
            own_broker(self._app).store.ask("hold", held.queue, entries=held.entry)
        except BROKER_FAILS as error:
            logger.warning("The unique key of task %s cannot be given back: %s", held.id, error)
