"""Every store, on a time that stands still until a test sets `now`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis

from kombu_delayed.backlog import Backlog
from kombu_delayed.store import Store
from kombu_delayed.testing import FakeBacklog, FakeStore

AnyStore = Store | FakeStore
AnyBacklog = Backlog | FakeBacklog

STORES: dict[str, Callable[[redis.Redis], AnyStore]] = {
    "redis": lambda client: Store(client, now="1000"),
    "fake": lambda client: FakeStore(now="1000"),
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, client: redis.Redis) -> AnyStore:
    return STORES[request.param](client)


@pytest.fixture
def backlog(store: AnyStore) -> AnyBacklog:
    store.partition_size = 4
    return backlog_of(store)


def backlog_of(store: AnyStore) -> AnyBacklog:
    return FakeBacklog(store, "q") if isinstance(store, FakeStore) else Backlog(store, "q")


def take_token(store: AnyStore) -> tuple[str, int] | None:
    """Take a wake token, as a waiting consumer does."""
    if isinstance(store, FakeStore):
        return store.take_token("q")
    found = store.client.zpopmin(store.keys("q").wake)
    return (found[0][0].decode(), int(found[0][1])) if found else None
