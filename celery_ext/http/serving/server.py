"""A standalone server for the API, with a timeout for the head of each request."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from ..app import Api

#: The most bytes of a head. No client of this API sends more.
HEAD_BYTES = 65_536

#: The host names that a local server serves: a page of another site cannot use them.
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")

#: How long a connection stays open after an answer. It must be longer than a proxy keeps it, which
#: is often a minute: a request that the proxy sends as it is closed fails with a 502.
IDLE_SECONDS = 75

#: How long running requests may take when the server shuts down.
GRACE_SECONDS = 20

#: How long they have to answer when they are broken off then.
ANSWER_SECONDS = 3


class _HeaderTimeout(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Uvicorn's protocol, with a timeout for the head of each request."""

    _header_seconds: float
    _head_timer: Any = None
    _head_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        was_waiting = self._awaits_head()
        if was_waiting:
            self._head_bytes += len(data)
            self._await_head()
        super().data_received(data)
        if not self._awaits_head():
            self._has_head()
        elif was_waiting and self._head_bytes > HEAD_BYTES:
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._has_head()
        super().connection_lost(error)

    def _awaits_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._header_seconds, self._too_late)

    def _has_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer, self._head_bytes = None, 0

    def _too_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()


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
        asyncio.get_running_loop().call_later(GRACE_SECONDS, self._break_off)
        await super().shutdown(sockets)

    def _break_off(self) -> None:
        for request in self.server_state.tasks:
            request.cancel()


def make_server(api: Api, host: str, port: int, **more: Any) -> Server:
    """Create a server, without running it; `more` is for uvicorn."""
    seconds = api.service.options.header_seconds
    config = uvicorn.Config(
        api,
        host=host,
        port=port,
        http=type("Timed", (_HeaderTimeout,), {"_header_seconds": seconds}),
        ws="none",
        lifespan="on",
        proxy_headers=False,
        server_header=False,
        access_log=False,
        timeout_graceful_shutdown=GRACE_SECONDS + ANSWER_SECONDS,
        timeout_keep_alive=IDLE_SECONDS,
        **more,
    )
    return Server(api, config)
