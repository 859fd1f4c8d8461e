"""Sentinels and a master that speak TLS."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from kombu import Connection

from tests.kit.sentinels import MASTER, SENTINEL_PASSWORD, SentinelProcess
from tests.kit.servers import free_port
from tests.kit.tls import passes_on, refuses, start_tls_server
from tests.kit.wait import wait_until


@dataclass
class Guarded:
    """A master that speaks TLS, and a Sentinel that speaks it on one port and not on the other."""

    ca_file: str
    plain_port: int
    tls_port: int

    def connection(self, url: str, sentinel: dict[str, Any], **more: Any) -> Connection:
        sentinel = {"password": SENTINEL_PASSWORD, **sentinel}
        options = {"master_name": MASTER, "sentinel_kwargs": sentinel}
        return Connection(url, transport_options=options, **more)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    directory: Path = tmp_path_factory.mktemp("guarded")
    with start_tls_server(directory / "server") as server:
        sentinel = SentinelProcess(server.binary, directory / "sentinel", free_port())
        tls_port = free_port()
        tls = {name: value for name, value in server.options.items() if name.startswith("tls-")}
        sentinel.configure(
            {
                "port": str(sentinel.port),
                "bind": "127.0.0.1",
                "dir": f'"{sentinel.directory}"',
                "requirepass": f'"{SENTINEL_PASSWORD}"',
                **tls,
                "tls-port": str(tls_port),
                "tls-replication": "yes",
                f"sentinel monitor {MASTER}": f"127.0.0.1 {server.port} 1",
            }
        )
        sentinel.start()
        try:
            wait_until(lambda: sentinel.master()["is_master"], "the Sentinel sees the master")
            yield Guarded(str(server.ca_file), sentinel.port, tls_port)
        finally:
            sentinel.stop()


def test_both_speak_tls(guarded: Guarded) -> None:
    authority = quote(guarded.ca_file, safe="")
    url = f"delayed+sentinels://127.0.0.1:{guarded.tls_port}/0?ssl_ca_certs={authority}"
    passes_on(guarded.connection(url, {}))


def test_as_options(guarded: Guarded) -> None:
    url, options = f"127.0.0.1:{guarded.tls_port}", {"ssl_ca_certs": guarded.ca_file}
    passes_on(guarded.connection(f"delayed+sentinels://{url}", {}, ssl=options))
    sentinel = {"ssl": True, **options}
    passes_on(guarded.connection(f"delayed+sentinel://{url}", sentinel, ssl=options))


def test_only_the_master_speaks_tls(guarded: Guarded) -> None:
    options, plain = {"ssl_ca_certs": guarded.ca_file}, f"127.0.0.1:{guarded.plain_port}"
    passes_on(guarded.connection(f"delayed+sentinel://{plain}", {}, ssl=options))
    url = f"delayed+sentinels://{plain}"
    passes_on(guarded.connection(url, {"ssl": False}, ssl=options))


@pytest.mark.parametrize("sentinel", [{}, {"ssl_cert_reqs": "none"}])
def test_an_unknown_authority_is_refused(guarded: Guarded, sentinel: dict[str, Any]) -> None:
    """The Sentinel's, and then the master's."""
    url = f"delayed+sentinels://127.0.0.1:{guarded.tls_port}"
    refuses(guarded.connection(url, sentinel))
