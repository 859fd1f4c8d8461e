"""Receives callbacks, on a free port of 127.0.0.1."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Receiver:
    """The requests received, and the answers by path: status, body and headers."""

    port: int = 0
    got: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    answers: dict[str, Any] = field(default_factory=dict)
    #: How many connections there have been.
    connections: int = 0

    def url(self, path: str = "/") -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def at(self, path: str) -> list[Any]:
        return [json.loads(body) for where, _, body in self.got if where == path]


@contextmanager
def receiving(tls: ssl.SSLContext | None = None, *, keeps: bool = False) -> Iterator[Receiver]:
    """Start a receiver. `keeps`: it keeps connections open for further requests."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1" if keeps else "HTTP/1.0"

        def setup(self) -> None:
            super().setup()
            receiver.connections += 1

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            receiver.got.append((self.path, dict(self.headers.items()), body))
            answer = receiver.answers.get(self.path, (200, b'{"code": 100}', {}))
            if callable(answer):
                answer(self)
                return
            status, content, headers = answer
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if keeps:
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_PUT = do_PATCH = do_DELETE = do_POST

        def log_message(self, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        server.daemon_threads = True
        receiver.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()
