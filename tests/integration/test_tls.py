"""`delayed+rediss://`: certificates are checked unless the URL says otherwise."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from kombu import Connection

from tests.kit.ledger import Ledger
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings, make_app
from tests.kit.tls import passes_on, refuses, start_tls_server
from tests.kit.workers import Worker

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start_tls_server(tmp_path_factory.mktemp("tls")) as server:
        yield server


@pytest.mark.parametrize(
    "query", ["ssl_ca_certs={authority}", "ssl_cert_reqs=none", "ssl_cert_reqs=CERT_NONE"]
)
@pytest.mark.parametrize("scheme", ["rediss", "redis"])
def test_as_the_url_says(tls_server: Server, scheme: str, query: str) -> None:
    """Options for TLS enable it, as in Kombu's Redis transport: nothing is sent in plain text."""
    authority = quote(str(tls_server.ca_file), safe="")
    base = f"delayed+{scheme}://127.0.0.1:{tls_server.port}/0"
    passes_on(Connection(f"{base}?{query.format(authority=authority)}"))


@pytest.mark.parametrize("requirement", [ssl.CERT_REQUIRED, "required", "CERT_REQUIRED"])
def test_authority_as_an_option(tls_server: Server, requirement: Any) -> None:
    options = {"ssl_ca_certs": str(tls_server.ca_file), "ssl_cert_reqs": requirement}
    passes_on(Connection(f"delayed+{tls_server.url}", ssl=options))


def test_an_unknown_authority_is_refused(tls_server: Server) -> None:
    refuses(Connection(f"delayed+{tls_server.url}"))
    refuses(Connection(f"delayed+redis://127.0.0.1:{tls_server.port}/0", ssl=True))


@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_certfile"])
def test_a_missing_file_is_named(tls_server: Server, option: str) -> None:
    options = {"ssl_ca_certs": str(tls_server.ca_file), option: "/no/such.pem"}
    connection = Connection(f"delayed+{tls_server.url}", ssl=options)
    with connection, pytest.raises(connection.connection_errors, match=f"{option} /no/such.pem"):
        connection.connect()


def test_plain_text_to_a_tls_server_is_a_connection_error(tls_server: Server) -> None:
    connection = Connection(f"delayed+redis://127.0.0.1:{tls_server.port}/0")
    with connection, pytest.raises(connection.connection_errors):
        connection.connect()


@pytest.mark.smoke
@pytest.mark.parametrize("pool", ["threads", "gevent"])
def test_worker(tls_server: Server, ledger: Ledger, tmp_path: Path, pool: str) -> None:
    config = {"broker_use_ssl": {"ssl_ca_certs": str(tls_server.ca_file)}}
    settings = Settings(f"delayed+{tls_server.url}", None, {}, str(ledger.path), config)
    with Worker(settings, tmp_path, pool=pool), make_app(settings) as app:
        ledger.wait_for_all([app.send_task("record", countdown=0.2).id])
