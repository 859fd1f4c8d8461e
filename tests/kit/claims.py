"""Steps of consumers of the queue `q`, and a server without free memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from kombu_delayed.store.claimable import Delivered
from kombu_delayed.store.store import Store


def deliver(
    store: Store,
    consumer: str = "A",
    want: int = 10,
    tag: int = 1,
    *,
    lease_ms: int = 30_000,
    **options: Any,
) -> Delivered:
    """Claim for a consumer that has not lost its lease."""
    answer = store.deliver("q", consumer, want, tag, lease_ms=lease_ms, **options)
    assert answer is not None
    return answer


def records(answer: Delivered) -> list[str]:
    return [record.decode() for record in answer.records]


def bodies(answer: Delivered) -> list[str]:
    return [record.split('"body":"')[1].split('"')[0] for record in records(answer)]


def ack(store: Store, *tags: int, consumer: str = "A", **more: Any) -> None:
    store.ack("q", consumer, tags, on_error=_refused, **more)
    store.size("q")  # an ack does not wait; the command after it does


def free(store: Store, *tags: int) -> None:
    store.free("q", "A", tags, on_error=_refused)


def _refused() -> None:
    pytest.fail("the server has refused it")


@contextmanager
def full(client: redis.Redis) -> Iterator[None]:
    """Leave the server no memory."""
    client.config_set("maxmemory", 1)
    try:
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            client.set("more", "")
        yield
    finally:
        client.config_set("maxmemory", 0)
