"""A standalone server for the API, with a timeout for the head of each request."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
import time
from contextlib import suppress
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from ..app import Api
from ..options import HttpOptions

logger = logging.getLogger(__name__)

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

#: Open files that are no connections of clients: connections to Redis, logs, modules.
OTHER_FILES = 64

#: How long to be silent about a lack of open files once it is logged.
LACK_SECONDS = 10


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
        self._lacked_at = -float(LACK_SECONDS)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._on_error)
        await super().startup(sockets)

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Asyncio reports a lack of open files thousands of times a second."""
        if getattr(context.get("exception"), "errno", None) not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._lacked_at >= LACK_SECONDS:
            self._lacked_at = time.monotonic()
            logger.warning("Too many open files: raise their limit (ulimit -n)")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish the running requests, then stop."""
        self._api.service.end_streams()
        asyncio.get_running_loop().call_later(GRACE_SECONDS, self._break_off)
        await super().shutdown(sockets)

    def _break_off(self) -> None:
        for request in self.server_state.tasks:
            request.cancel()


def _most_connections(options: HttpOptions) -> int | None:
    """Raise this process's limit of open files as far as needed. Returns what it has for clients.

    Beyond that, Redis could not be reached any more, and all requests would fail.
    """
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    wanted = options.streams + options.polls + options.waiting + OTHER_FILES
    if soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return max(soft - OTHER_FILES, 1)


def make_server(api: Api, host: str, port: int, **more: Any) -> Server:
    """Create a server, without running it; `more` is for uvicorn."""
    options = api.service.options
    seconds = options.header_seconds
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
        limit_concurrency=_most_connections(options),
        timeout_graceful_shutdown=GRACE_SECONDS + ANSWER_SECONDS,
        timeout_keep_alive=IDLE_SECONDS,
        **more,
    )
    return Server(api, config)
