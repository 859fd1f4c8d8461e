"""`delayed+rediss://`: certificates are checked unless the URL says otherwise."""

from __future__ import annotations

import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from kombu import Connection, Exchange, Queue

from tests.kit.inbox import Inbox
from tests.kit.ledger import Ledger
from tests.kit.servers import Server, start_server
from tests.kit.tasks_app import Settings, make_app
from tests.kit.workers import Worker

MAIL = Queue("mail", Exchange("mail"), routing_key="mail")


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # The bundled servers are built without TLS, so this needs one of the operating system's. It is
    # no dependency of anything else, hence a skip in CI too.
    for program in ("redis-server", "openssl"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not on PATH: no server with TLS")
    try:
        server = start_server("redis", tmp_path_factory.mktemp("tls"), tls=True)
    except RuntimeError as error:
        if "tls" not in str(error).lower():
            raise
        pytest.skip("redis-server on PATH is built without TLS")
    with server:
        yield server


def url_of(server: Server, **query: str) -> str:
    options = "&".join(f"{name}={quote(value, safe='')}" for name, value in query.items())
    return f"delayed+{server.url}?{options}"


def passes_on(connection: Connection) -> None:
    with connection:
        inbox = Inbox(connection, MAIL)
        producer = connection.Producer(exchange=MAIL.exchange, routing_key="mail")
        producer.publish("later", declare=[MAIL], headers={"x-delay": 100})
        producer.publish("now", declare=[MAIL])
        assert inbox.receive(2) == ["now", "later"]


def refuses(connection: Connection) -> None:
    with connection, pytest.raises(connection.connection_errors, match="certificate"):
        connection.connect()


def test_authority_in_the_url(tls_server: Server) -> None:
    passes_on(Connection(url_of(tls_server, ssl_ca_certs=str(tls_server.ca_file))))


@pytest.mark.parametrize("requirement", [ssl.CERT_REQUIRED, "required", "CERT_REQUIRED"])
def test_authority_as_an_option(tls_server: Server, requirement: Any) -> None:
    options = {"ssl_ca_certs": str(tls_server.ca_file), "ssl_cert_reqs": requirement}
    passes_on(Connection(f"delayed+{tls_server.url}", ssl=options))


def test_an_unknown_authority_is_refused(tls_server: Server) -> None:
    refuses(Connection(f"delayed+{tls_server.url}"))


def test_ssl_true_checks_as_well(tls_server: Server) -> None:
    refuses(Connection(f"delayed+redis://127.0.0.1:{tls_server.port}/0", ssl=True))


@pytest.mark.parametrize("none", ["none", "CERT_NONE"])
def test_unchecked_on_request(tls_server: Server, none: str) -> None:
    passes_on(Connection(url_of(tls_server, ssl_cert_reqs=none)))


def test_plain_text_to_a_tls_server_is_a_connection_error(tls_server: Server) -> None:
    connection = Connection(f"delayed+redis://127.0.0.1:{tls_server.port}/0")
    with connection, pytest.raises(connection.connection_errors):
        connection.connect()


@pytest.mark.smoke
@pytest.mark.parametrize("pool", ["threads", "gevent"])
def test_worker(tls_server: Server, tmp_path: Path, pool: str) -> None:
    ledger = Ledger(tmp_path / "ledger")
    config = {"broker_use_ssl": {"ssl_ca_certs": str(tls_server.ca_file)}}
    settings = Settings(f"delayed+{tls_server.url}", None, {}, str(ledger.path), config)
    with Worker(settings, tmp_path, pool=pool), make_app(settings) as app:
        result = app.send_task("record", countdown=0.2)
        ledger.wait_for_all([result.id])
