"""Fanout exchanges, whose messages come over the pub/sub connection of a channel."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, partial
from queue import Empty
from time import monotonic
from typing import Any

from kombu.utils.encoding import bytes_to_str
from redis.exceptions import ResponseError

from ...connection.native import get_logger
from ...errors import UNREACHABLE, translate
from .connecting import ConnectingChannel

logger = get_logger(__name__)

LISTEN_RETRY_SECONDS = 0.2


class FanoutChannel(ConnectingChannel):
    """Subscribes to fanout exchanges as Kombu does, and again after a lost connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.subscription = Subscription(self)
        super().__init__(*args, **kwargs)

    def hears_over(self, connection: Any) -> bool:
        """Whether messages of fanout exchanges still come over a pub/sub connection."""
        return True

    @cached_property
    def subclient(self) -> Any:
        """The pub/sub client, which does not block."""
        client = super().subclient
        client.parse_response = partial(_read, client.parse_response)
        return client

    def basic_consume(self, queue: str, *args: Any, **kwargs: Any) -> Any:
        """Consume from `queue`. Copies from a fanout exchange that cannot be read are dropped."""
        result = super().basic_consume(queue, *args, **kwargs)
        if queue in self.active_fanout_queues:
            callbacks = self.connection._callbacks
            callbacks[queue] = partial(self._hand_copy, callbacks[queue])
        return result

    def _hand_copy(self, callback: Callable[[Any], None], payload: Any) -> None:
        try:
            callback(payload)
        except Exception as error:
            if self.qos.can_decode(payload):
                raise  # it is the program's own error
            logger.error("A fanout message is dropped, as it cannot be read: %r", error)

    def _receive(self) -> bool:
        """Deliver what has come over the pub/sub connection; returns whether it was a message."""
        client, has_delivered, polled = self.subclient, False, True
        while self._reads_ahead(client.connection, polled):
            with suppress(Empty):
                has_delivered = bool(self._receive_one(client)) or has_delivered
            polled = False
        return has_delivered

    def _reads_ahead(self, connection: Any, polled: bool) -> bool:
        try:
            return connection is not None and connection.read_ahead(polled, push_request=True)
        except UNREACHABLE:
            self._in_listen = None  # what `_receive_one` raises may be the program's own
            raise

    def _handle_message(self, client: Any, response: Any) -> dict[str, Any]:
        found: dict[str, Any] = super()._handle_message(client, response)
        if found["pattern"] is not None and self._exchange(found) not in self._fanout_to_queue:
            found["data"] = None  # it was on its way when its consumer was cancelled
        return found

    def _exchange(self, message: dict[str, Any]) -> str:
        channel = bytes_to_str(message["channel"])
        return str(channel.partition(".")[2] if channel[:1] == "/" else channel).partition("/")[0]

    def _basic_cancel(self, consumer_tag: str) -> Any:
        before = {*self.active_fanout_queues}
        result = super()._basic_cancel(consumer_tag)
        if self.active_fanout_queues != before:
            self.subscription.queues = frozenset()  # another queue may have the same topic
            for queue in self.active_fanout_queues:
                self._fanout_to_queue.setdefault(self._fanout_queues[queue][0], queue)
        return result

    def _unsubscribe_from(self, queue: str) -> None:
        # Kombu 5.5 sends UNSUBSCRIBE for patterns of PSUBSCRIBE.
        client = self.subclient
        if client.connection is not None and client.connection._sock is not None:
            topics = getattr(
                self, "_get_subscribe_topics", lambda q: [self._get_subscribe_topic(q)]
            )
            client.punsubscribe(*topics(queue))

    @staticmethod
    def _pubsub_reauth_handled_by_redis(connection: Any) -> bool:
        # redis-py only handles connections of its PubSub; this one was taken from the pool by hand.
        return False


class Subscription:
    """Keeps the pub/sub connection of a channel subscribed to all of its fanout exchanges."""

    def __init__(self, channel: FanoutChannel) -> None:
        self._channel = channel
        self.queues: frozenset[str] = frozenset()
        #: The socket over which it has subscribed: redis-py may open another one on its own.
        self._over: Any = None
        self.broken_since: float | None = None
        self.retry_at = -math.inf

    @property
    def lasts(self) -> bool:
        """Whether it covers all of the fanout exchanges, over the present connection."""
        sock = getattr(self._channel.subclient.connection, "_sock", None)
        is_same = sock is not None and sock is self._over
        return is_same and self.queues == self._channel.active_fanout_queues

    @property
    def needs_care(self) -> bool:
        """Whether `keep` has something to do."""
        return (
            bool(self._channel.active_fanout_queues)
            and not self.lasts
            and monotonic() >= self.retry_at
        )

    def keep(self) -> float:
        """Subscribe again if necessary; returns when to try again, infinity if it lasts."""
        if monotonic() < self.retry_at:
            return self.retry_at
        try:
            self._subscribe()
        except UNREACHABLE as error:
            self._broken(error)
            return self.retry_at
        self.broken_since = None
        return math.inf

    def _subscribe(self) -> None:
        channel, client = self._channel, self._channel.subclient
        if client.connection is None:
            client.connection = client.connection_pool.get_connection()
        if not channel.hears_over(client.connection):
            client.connection.disconnect()
        if client.connection._sock is None:
            client.connection.connect()
        if not self.lasts:
            client.health_check_response_counter = 0  # what was asked over another connection
            channel._subscribe()
            self.queues = frozenset(channel.active_fanout_queues)
            self._over = client.connection._sock

    def _broken(self, error: BaseException) -> None:
        now, channel = monotonic(), self._channel
        channel._in_listen = None
        if channel.subclient.connection is not None:
            channel.subclient.connection.disconnect()
        if self.broken_since is None:
            self.broken_since = now
        if now - self.broken_since >= channel.patience_seconds:
            raise error
        logger.debug("Lost the pub/sub connection, trying again: %s", error)
        self.retry_at = max(now, self.retry_at + LISTEN_RETRY_SECONDS)

    def read(self) -> bool:
        """Deliver what has come; returns whether it was a message."""
        try:
            return self._channel._receive()
        except UNREACHABLE as error:
            if self._channel._in_listen and _is_open(self._channel.subclient.connection):
                raise  # it is the program's own error, not the connection's
            self._broken(error)
            return False


def _read(parse_response: Callable[..., Any]) -> Any:
    try:
        return parse_response(block=False)
    except ResponseError as error:  # a server that is not ready may refuse even a PING
        raise translate(error) from error


def _is_open(connection: Any) -> bool:
    """Whether a connection is open, and the server has not closed it."""
    if connection is None or connection._sock is None:
        return False
    try:
        connection.can_read(timeout=0)
    except UNREACHABLE:
        return False
    return True
