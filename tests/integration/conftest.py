"""Connections and queues for the tests of this folder."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from kombu import Connection, Exchange, Queue

from tests.kit.clusters import Cluster, start_cluster
from tests.kit.servers import Server, available_kinds


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    """Celery's results talk to their server when they are collected: while it is there."""
    gc.collect()


@pytest.fixture
def connect(server: Server) -> Iterator[Callable[..., Connection]]:
    """Open connections that are closed at the end; keyword arguments are transport options."""
    with ExitStack() as stack:

        def open_connection(**options: Any) -> Connection:
            connection = Connection(f"delayed+{server.url}", transport_options=options)
            return stack.enter_context(connection)

        yield open_connection


@pytest.fixture
def connection(connect: Callable[..., Connection]) -> Connection:
    return connect()


@pytest.fixture
def mail() -> Queue:
    return Queue("mail", Exchange("mail", type="direct"), routing_key="mail")


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One Cluster for the whole session; use `cluster`, which is empty and well."""
    with start_cluster(available_kinds()[0], tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Cluster:
    """Three masters without a key, and a replica of each, all well."""
    shared_cluster.heal()
    shared_cluster.flush()
    return shared_cluster


@pytest.fixture
def names(cluster: Cluster) -> list[str]:
    """Three queues of the Cluster, each on a node of its own."""
    return cluster.queues_apart()


@pytest.fixture
def connect_cluster(cluster: Cluster) -> Iterator[Callable[..., Connection]]:
    """As `connect`, to the Cluster; `url` is another URL."""
    with ExitStack() as stack:

        def open_connection(url: str = cluster.url, **options: Any) -> Connection:
            return stack.enter_context(Connection(f"delayed+{url}", transport_options=options))

        yield open_connection
