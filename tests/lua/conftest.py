from __future__ import annotations

import pytest
import redis

from kombu_delayed.store.store import Store


@pytest.fixture
def store(client: redis.Redis) -> Store:
    """A store whose clock shows 1000 ms, until a test sets `store.now`."""
    return Store(client, now="1000")
