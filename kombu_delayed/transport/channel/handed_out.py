"""What a program says, and asks, of messages that it was handed out and has not acked."""

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
        self._pool: Any = None
        self._store: Store | None = None
        self._lock = threading.RLock()

    def waits(self, tag: int, *on_return: Callable[[], Any]) -> bool:
        """Its program calls `begins` before it begins on a message; until then it may go back.

        What is to be called then may be given; in any thread. Returns whether it is to call
        `has_ended` when it has ended, whenever the message is acked.
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
        """Whether the message that is handed over was taken for good: by fanout, or without acks.

        It cannot go back: its program need not ask whether it `begins`.
        """
        return self._channel.qos.reserved.is_for_good(tag)

    def begins(self, tag: int) -> bool:
        """Whether its program may begin on a message that `waits`; from any thread.

        False: it has gone back to its queue, or the lease has ended.
        """
        return self._channel.qos.reserved.begin(tag) and self.holds(tag)

    def has_ended(self, tag: int) -> None:
        """What its program did with a message has ended; from any thread. Twice is safe."""
        channel = self._channel
        if channel.qos.slots.task_ended(tag):
            remaining = channel.consumer and channel.consumer.remaining
            if remaining:
                remaining.hurry()
            else:
                channel.on_done()

    def hold(self, held: Held) -> None:
        """A task holds its unique key for some time, or has ended; from any thread."""
        self._channel.qos.outbox.held.append(held)
        if not held.left_ms:
            self._channel.on_done()

    def give_back(self, tags: Iterable[int]) -> None:
        """Put messages back at once, as what was at work on them was ended. No attempt counts."""
        for tag in tags:
            self._channel.qos.give_back_held(tag)
        self._channel.flush()

    def holds(self, tag: int) -> bool:
        """Whether a message is this consumer's; from any thread.

        True where the broker cannot be asked, and for what was taken for good.
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
            # The thread that consumes may have closed the connection, as it has heard of the end.
            return not lease.lost and qos.queue_of(tag) is not None

    @property
    def store(self) -> Store:
        """As the lease's; that one's connection is the keeper's alone, whose thread is native."""
        with self._lock:
            if self._store is None:
                self._pool = self._channel._impatient_pool()
                self._store = self._channel.store.over(self._channel._client_of(self._pool))
            return self._store

    def hang_up(self) -> None:
        """Close the connections of `store`."""
        if self._pool is not None:
            self._pool.disconnect()
