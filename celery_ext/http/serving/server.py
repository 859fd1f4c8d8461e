"""A standalone server for the API."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

import uvicorn

from ..app import Api
from .header_timeout import header_timeout

#: The host names that a local server serves: a page of another site cannot use them.
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")

#: How long running requests may take when the server shuts down.
GRACE_SECONDS = 20


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Server(uvicorn.Server):
    """The server of uvicorn, which also ends event streams when it shuts down."""

    def __init__(self, api: Api, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._api = api

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish the running requests, then stop."""
        self._api.service.end_streams()
        await super().shutdown(sockets)


def make_server(api: Api, host: str, port: int, **more: Any) -> Server:
    """Create a server, without running it; `more` is for uvicorn."""
    config = uvicorn.Config(
        api,
        host=host,
        port=port,
        http=header_timeout(api.service.options.header_seconds),
        ws="none",
        lifespan="on",
        proxy_headers=False,
        server_header=False,
        access_log=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
        **more,
    )
    return Server(api, config)
