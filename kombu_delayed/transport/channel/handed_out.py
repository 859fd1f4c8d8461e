"""How a program deals with messages that were handed out to it and that it has not acked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from ...consumer.outbox import Held
from ...errors import UNREACHABLE
from ...store.store import Store
from .connecting import ConnectingChannel


class HandedOut:
    """The messages that a channel has handed out, each given by its delivery tag."""

    def __init__(self, channel: ConnectingChannel) -> None:
        self._channel = channel
        self._store: Store | None = None
        self._lock = threading.RLock()

    def waits(self, tag: int, *on_return: Callable[[], Any]) -> bool:
        """Say that the program calls `begins` before a message; until then the message may go back.

        If it goes back, `on_return` is called, in any thread. Returns whether the program has to
        call `has_ended` when its work has ended, even if the message is acked earlier.
        """
        channel, qos = self._channel, self._channel.qos
        if not self.is_for_good(tag):
            qos.reserved.add(tag, *on_return)
        has_slots: bool = qos.slots.keep(tag)
        queue = qos.queue_of(tag)
        if queue and channel.consumer is not None and queue not in channel.consumer.sources:
            # It was being handed over when a signal handler cancelled its queue.
            qos.give_back_reserved(queue)
            channel.flush()
        return has_slots

    def is_for_good(self, tag: int) -> bool:
        """Whether a message was taken for good when it was handed over: by fanout, or without acks.

        It cannot go back, so its program need not ask whether it `begins`.
        """
        return self._channel.qos.reserved.is_for_good(tag)

    def begins(self, tag: int) -> bool:
        """Whether its program may begin on a message that `waits`. Safe from any thread.

        False if it has gone back to its queue, or the lease has ended.
        """
        return self._channel.qos.reserved.begin(tag) and self.holds(tag)

    def has_ended(self, tag: int) -> None:
        """Say that the work on a message has ended. Safe from any thread, and to call twice."""
        channel = self._channel
        if channel.qos.slots.task_ended(tag):
            remaining = channel.consumer and channel.consumer.remaining
            if remaining:
                remaining.hurry()
            else:
                channel.on_done()

    def hold(self, held: Held) -> None:
        """Say that a task holds its unique key for a while, or has ended. Safe from any thread."""
        self._channel.qos.outbox.hold(held)
        if not held.left_ms:
            self._channel.on_done()

    def give_back(self, tags: Iterable[int]) -> None:
        """Put messages back at once whose work was stopped. This does not count as an attempt."""
        for tag in tags:
            self._channel.qos.give_back_held(tag)
        self._channel.flush()

    def holds(self, tag: int) -> bool:
        """Whether this consumer still holds a message. Safe from any thread.

        True if the broker cannot be asked, and always on a channel without ack emulation.
        """
        if not self._channel.ack_emulation:
            return True
        qos, consumer = self._channel.qos, self._channel.consumer
        queue = qos.queue_of(tag)
        if queue is None or consumer is None:
            return False
        lease = consumer.lease
        try:
            return not lease.may_have_ended(queue) or lease.renew(queue, self.store)
        except UNREACHABLE:
            # The thread that consumes may have closed the connection because the lease has ended.
            return not lease.lost and qos.queue_of(tag) is not None

    @property
    def store(self) -> Store:
        """A store of its own: only the keeper's native thread may use the lease's connection."""
        with self._lock:
            if self._store is None:
                client = self._channel._client_of(self._channel._impatient_pool())
                self._store = self._channel.store.over(client)
            return self._store

    def hang_up(self) -> None:
        """Close the connections of `store`."""
        if self._store is not None:
            self._store.hang_up()
