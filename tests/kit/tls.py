"""A server that speaks TLS, if the operating system has one.

The bundled servers are built without TLS. Nothing else depends on it, hence a skip in CI too.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection, Exchange, Queue

from tests.kit.inbox import Inbox
from tests.kit.servers import Server, start_server


def start_tls_server(directory: Path, **options: Any) -> Server:
    for program in ("redis-server", "openssl"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not on PATH: no server with TLS")
    try:
        return start_server("redis", directory, tls=True, **options)
    except RuntimeError as error:
        if "tls" not in str(error).lower():
            raise
        pytest.skip("redis-server on PATH is built without TLS")


def passes_on(connection: Connection) -> None:
    """Messages pass through a connection, which is closed afterwards."""
    mail = Queue("mail", Exchange("mail"), routing_key="mail")
    with connection:
        inbox = Inbox(connection, mail)
        producer = connection.Producer(exchange=mail.exchange, routing_key="mail")
        producer.publish("later", declare=[mail], headers={"x-delay": 100})
        producer.publish("now", declare=[mail])
        assert inbox.receive(2) == ["now", "later"]


def refuses(connection: Connection) -> None:
    with connection, pytest.raises(connection.connection_errors, match="certificate"):
        connection.transport.establish_connection()
