"""Sends messages elsewhere at their due time, instead of running them here."""

from __future__ import annotations

from contextlib import suppress
from time import monotonic
from typing import Any

from kombu import Connection, Queue, pools
from kombu.exceptions import OperationalError

from kombu_delayed.consumer.policy.decisions import Decision, Delay, Drop

from ..tasks.body import raw_body
from .message import Message
from .policy import Policy, PolicyError

#: How long a message is delayed while the other broker cannot be reached.
AGAIN_MS = 10_000

#: How long a process leaves a broker alone that it could not reach.
PATIENCE_SECONDS = 5.0

#: How long a worker waits for a silent broker before that counts as out of reach.
SILENCE_SECONDS = 3.0

#: The options of transports for that, by the beginnings of their URLs.
SILENCE = {
    "redis": ("socket_timeout", "socket_connect_timeout"),
    "amqp": ("connect_timeout", "read_timeout", "write_timeout"),
}

#: The properties that a message keeps.
KEPT = ("correlation_id", "reply_to", "message_id", "priority", "delivery_mode", "expiration")


class HandOver(Policy):
    """Forwards messages at their due time: `HandOver("amqp://rabbit/", queue="emails")`.

    `url` is any broker that Kombu can reach; None: this app's own. Messages go to `queue`, which is
    declared, or to an existing `exchange` with `routing_key`. They are first sent there, with
    confirms if the transport supports them, and then deleted here: at least once.
    `transport_options` are those of the other broker. Raises PolicyError for invalid values.
    """

    is_last = True

    def __init__(
        self,
        url: str | None = None,
        *,
        queue: str = "",
        exchange: str = "",
        routing_key: str = "",
        transport_options: dict[str, Any] | None = None,
    ) -> None:
        if bool(queue) == bool(exchange):
            raise PolicyError("HandOver takes either a queue or an exchange with a routing_key")
        self.url = _readable(url)
        self.queue = queue
        self._to = {"exchange": exchange, "routing_key": routing_key or queue}
        self._declare = [Queue(queue, routing_key=queue)] if queue else []
        self._options = {"confirm_publish": True, **(transport_options or {})}
        self._avoid_until = 0.0
        self._name = f"queue {queue!r}" if queue else f"exchange {exchange!r}"

    def __repr__(self) -> str:
        where = Connection(self.url).as_uri() if self.url else "the same broker"
        return f"HandOver({self._name} of {where})"

    def check(self, others: tuple[Policy, ...]) -> None:
        """Raises PolicyError if it is not the last one: policies behind it are never checked."""
        if others[-1] is not self:
            raise PolicyError(f"{self} comes last: no policy behind it is ever checked")

    def decide(self, message: Message) -> Decision:
        """Send it there and then drop it here, or wait if that broker cannot be reached."""
        if monotonic() < self._avoid_until:
            return Delay(message.now_ms + AGAIN_MS, f"{self} cannot be reached")
        try:
            self._send(message)
        except (OperationalError, OSError) as error:
            self._avoid_until = monotonic() + PATIENCE_SECONDS
            return Delay(message.now_ms + AGAIN_MS, f"{self} cannot be reached: {error}")
        return Drop(f"handed over to {self._name}", revoked=False)

    def _send(self, message: Message) -> None:
        properties = {name: message.properties.get(name) for name in KEPT}
        if (lasts_ms := properties.pop("expiration")) is not None:
            properties["expiration"] = float(lasts_ms) / 1000  # Kombu takes it in seconds
        headers = {**message.headers, "eta": None}
        for name in ("redelivered", "x-delay"):
            headers.pop(name, None)
        payload = message.info.payload
        with self._producers(message).acquire(block=True) as producer:
            producer.publish(
                raw_body(message.app, message.info),
                content_type=payload.get("content-type"),
                content_encoding=payload.get("content-encoding"),
                compression=headers.pop("compression", None),
                headers=headers,
                declare=self._declare,
                retry=True,
                retry_policy={"max_retries": 1, "interval_start": 0},
                **self._to,
                **{name: value for name, value in properties.items() if value is not None},
            )

    def _producers(self, message: Message) -> Any:
        if self.url is None:
            return message.app.amqp.producer_pool
        scheme = self.url.partition(":")[0].removeprefix("delayed+")
        names = next((SILENCE[each] for each in SILENCE if scheme.startswith(each)), ())
        options = {**dict.fromkeys(names, SILENCE_SECONDS), **self._options}
        return pools.producers[Connection(self.url, transport_options=options)]


def _readable(url: str | None) -> str | None:
    """Return a URL. Raises PolicyError, without its password, if Kombu cannot read it."""
    try:
        with suppress(ImportError):  # its transport may be missing where tasks are only sent
            Connection(url or None).as_uri()
    except (KeyError, TypeError, ValueError):
        raise PolicyError(
            f"HandOver takes the URL of a broker, such as amqp://user:password@host/vhost; Kombu "
            f"cannot read the one that begins with {str(url).partition(':')[0]!r}"
        ) from None
    return url
