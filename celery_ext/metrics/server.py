"""Serves the metrics of a worker: one page, on its own port."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6
from socketserver import TCPServer
from typing import Any

from celery.utils.log import get_logger
from prometheus_client import CONTENT_TYPE_LATEST

from kombu_delayed.connection.forks import in_children

logger = get_logger(__name__)

LAST_PORT = 65_535

#: How long a client may take to send its request.
REQUEST_SECONDS = 10


class MetricsServer(ThreadingHTTPServer):
    """Serves `/metrics` from `start` to `stop`; `page` makes the response, in its threads."""

    daemon_threads = True
    allow_reuse_port = False

    def __init__(self, host: str, port: int, page: Callable[[], bytes]) -> None:
        self.address_family = AF_INET6 if ":" in host else AF_INET
        self.page = page
        super().__init__((host, port), _Handler)
        _open.add(self)

    @property
    def url(self) -> str:
        """The URL at which Prometheus finds it."""
        host, port = self.server_address[:2]
        shown = f"[{host!s}]" if self.address_family == AF_INET6 else str(host)
        return f"http://{shown}:{port}/metrics"

    def server_bind(self) -> None:
        """Bind without looking up a name, which may be slow."""
        TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Only log if Prometheus hung up before the page was ready: it asks again."""
        if isinstance(sys.exc_info()[1], OSError):
            logger.debug("A request for metrics failed", exc_info=True)
        else:
            super().handle_error(request, client_address)

    def start(self) -> None:
        name = "delayed-metrics"
        self._thread = threading.Thread(target=self.serve_forever, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join(REQUEST_SECONDS)


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer
    timeout = REQUEST_SECONDS

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404)
            return
        page = self.server.page()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE_LATEST)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *args: object) -> None:
        logger.debug(format, *args)


def first_free(host: str, port: int, ports: int, page: Callable[[], bytes]) -> MetricsServer | None:
    """A server on the first free one of `ports` ports from `port` on, or None if none is free."""
    tried = range(port, min(port + (ports if port else 1), LAST_PORT + 1))
    for each in tried:
        try:
            return MetricsServer(host, each, page)
        except OSError as error:
            refused = error
    last = f" to {tried[-1]}" if len(tried) > 1 else ""
    logger.error("Metrics are not served: port %d%s of %s: %s", port, last, host, refused)
    return None


_open: weakref.WeakSet[MetricsServer] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Close the port: a child of a pool that outlives its worker must not keep it."""
    for server in _open:
        server.socket.close()


in_children(_leave_to_parent)
