"""Messages of plain Kombu, by default for one queue."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import redis
from kombu import Connection, Exchange, Queue

MAIL = Queue("mail", Exchange("mail"), routing_key="mail")
NEWS = Queue("reader", Exchange("news", type="fanout"))


def queue_of(name: str) -> Queue:
    """Return a queue bound to an exchange of its own, both with the same name."""
    return Queue(name, Exchange(name), routing_key=name)


def publish(
    connection: Connection,
    *bodies: Any,
    queue: Queue = MAIL,
    delay_ms: int | None = None,
    **options: Any,
) -> None:
    """Declare the queue and publish to it; options are those of `Producer.publish`."""
    headers = dict(options.pop("headers", {}))
    if delay_ms is not None:
        headers["x-delay"] = delay_ms
    producer = connection.Producer(exchange=queue.exchange, routing_key=queue.routing_key)
    for body in bodies:
        producer.publish(body, headers=headers, declare=[queue], **options)


def in_ms(ms: int) -> dict[str, str]:
    """Headers of a message that is due in this many milliseconds."""
    return {"eta": (datetime.now(timezone.utc) + timedelta(milliseconds=ms)).isoformat()}


def unacked(client: redis.Redis, queue: str = "mail") -> int:
    return sum(client.hlen(key) for key in client.keys(f"{{{queue}}}:unacked:*"))
