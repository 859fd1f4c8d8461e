"""A plain Kombu consumer that keeps the messages it receives."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Callable
from typing import Any

from kombu import Connection, Consumer, Queue

#: Opens a connection; keyword arguments are transport options.
Connect = Callable[..., Connection]


class Inbox:
    """Consumes queues on a channel; acks at once unless told otherwise."""

    def __init__(
        self,
        channel: Any,
        *queues: Queue,
        prefetch_count: int = 0,
        ack: bool = True,
        no_ack: bool = False,
    ) -> None:
        self.messages: list[Any] = []
        self.acks = ack and not no_ack
        self.consumer = Consumer(
            channel,
            list(queues),
            on_message=self._take,
            no_ack=no_ack,
            accept=["json", "text/plain"],
        )
        if prefetch_count:
            self.consumer.qos(prefetch_count=prefetch_count)
        self.consumer.consume()

    @property
    def connection(self) -> Any:
        return self.consumer.channel.connection.client

    @property
    def bodies(self) -> list[Any]:
        return [message.decode() for message in self.messages]

    def receive(self, count: int, timeout_seconds: float = 30) -> list[Any]:
        """Drain until `count` messages have come in all; returns their bodies."""
        deadline = time.monotonic() + timeout_seconds
        while len(self.messages) < count:
            left = deadline - time.monotonic()
            if left <= 0:
                consumer = getattr(self.consumer.channel, "consumer", None)  # stock has none
                raise AssertionError(
                    f"{len(self.messages)} of {count} messages in {timeout_seconds:g} s: "
                    f"{self.bodies}; {vars(consumer) if consumer is not None else ''}"
                )
            with contextlib.suppress(socket.timeout):
                self.connection.drain_events(timeout=left)
        return self.bodies

    def stop_polling(self) -> None:
        """From now on, only wake tokens make it look for messages."""
        for source in self.consumer.channel.consumer.sources.values():
            source.poll_at = math.inf
            source.plan_poll = lambda *_: None

    def drain(self, seconds: float = 0.2) -> list[Any]:
        """Drain for this many seconds, with or without messages; returns all bodies."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(socket.timeout):
            while (left := deadline - time.monotonic()) > 0:
                self.connection.drain_events(timeout=left)
        return self.bodies

    def _take(self, message: Any) -> None:
        self.messages.append(message)
        if self.acks:
            message.ack()
