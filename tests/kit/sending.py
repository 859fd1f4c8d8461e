"""Helpers to send messages of plain Kombu."""

from __future__ import annotations

from typing import Any

from kombu import Connection, Exchange, Queue


def queue_of(name: str) -> Queue:
    """Return a queue bound to an exchange of its own, both with the same name."""
    return Queue(name, Exchange(name), routing_key=name)


def publish(
    connection: Connection,
    body: Any,
    queue: Queue,
    delay_ms: int = 0,
    headers: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Send a message to a queue after declaring it."""
    connection.Producer().publish(
        body,
        exchange=queue.exchange,
        routing_key=queue.routing_key,
        headers={"x-delay": delay_ms, **(headers or {})},
        declare=[queue],
        **options,
    )
