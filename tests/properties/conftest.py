from __future__ import annotations

from collections.abc import Callable

import pytest
import redis

from kombu_delayed.store.store import Limits, Store


@pytest.fixture
def begin(client: redis.Redis, store: Store) -> Callable[[int], Store]:
    """An empty database for each example; the partition size makes splits likely."""

    def reset(partition_size: int) -> Store:
        client.flushall()
        store.now, store.partition_size, store.limits = "1000", partition_size, Limits()
        return store

    return reset
