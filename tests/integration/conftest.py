"""Connections and queues for the tests of this folder."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from kombu import Connection, Exchange, Queue

from tests.kit.servers import Server


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
