"""How many tasks the HTTP API takes, and how soon it answers.

The server, Redis and the program that asks share the machine: the latter is one thread that waits
on all its connections at once, sends the same bytes again and looks at little of each answer.
"""

from __future__ import annotations

import json
import selectors
import socket
from time import perf_counter

from tests.benchmarks.app import BROKER, QUEUE
from tests.benchmarks.fill import fill, sample, store_of
from tests.benchmarks.report import NOTHING, Benchmark, Figures, Row
from tests.benchmarks.rig import Rig
from tests.kit.servers import free_port
from tests.kit.wait import wait_until

CONNECTIONS = 32
LINES = 5_000


def _request(method: str, path: str, kind: str, body: bytes) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: {kind}\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


class Connection:
    """Sends requests and reads answers, with little work of its own."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest = b""

    def ask(self, request: bytes) -> bytes:
        """The body of the answer."""
        self.send(request)
        while (body := self.receive()) is None:
            pass
        return body

    def send(self, request: bytes) -> None:
        self._socket.sendall(request)

    def receive(self) -> bytes | None:
        """Read what has come; the body of the answer where that is all of it."""
        part = self._socket.recv(1 << 20)
        if not part:
            raise RuntimeError("the server has closed the connection")
        self._rest += part
        head, end, body = self._rest.partition(b"\r\n\r\n")
        if not end:
            return None
        if not head.startswith(b"HTTP/1.1 20"):
            raise RuntimeError(self._rest.decode())
        if len(body) < int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]):
            return None
        self._rest = b""
        return body

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()


def create_singly(port: int, count: int) -> float:
    """Tasks per second, one request each, over several connections."""
    task = {"task": "work", "delay": "1h"}
    request = _request("POST", "/v1/tasks", "application/json", json.dumps(task).encode())
    connections = [Connection(port) for _ in range(CONNECTIONS)]
    selector = selectors.DefaultSelector()
    for connection in connections:
        selector.register(connection, selectors.EVENT_READ, connection)
    began = perf_counter()
    for connection in connections:
        connection.send(request)
    sent, answered = len(connections), 0
    while answered < count:
        for key, _ in selector.select():
            if key.data.receive() is not None:
                answered += 1
                if sent < count:
                    sent += 1
                    key.data.send(request)
    seconds = perf_counter() - began
    for connection in connections:
        connection.close()
    return count / seconds


def create_in_bulk(port: int, count: int) -> float:
    """Tasks per second, many a request."""
    line = json.dumps({"task": "work", "args": [1], "delay": "1h"}) + "\n"
    request = _request("POST", "/v1/bulk", "application/x-ndjson", (line * LINES).encode())
    connection = Connection(port)
    began = perf_counter()
    for _ in range(count // LINES):
        connection.ask(request)
    return count // LINES * LINES / (perf_counter() - began)


def look_up(port: int, count: int) -> float:
    """The 99th percentile of `GET /v1/tasks/{id}`, in ms."""
    connection = Connection(port)
    task = {"task": "work", "id": "known", "delay": "1h"}
    body = json.dumps(task).encode()
    connection.ask(_request("POST", "/v1/tasks", "application/json", body))
    request = _request("GET", "/v1/tasks/known", "application/json", b"")
    took = []
    for _ in range(count):
        began = perf_counter()
        connection.ask(request)
        took.append(perf_counter() - began)
    connection.close()
    return 1000 * sorted(took)[int(count * 0.99)]


def serve(rig: Rig) -> int:
    """Start a server; returns its port."""
    port = free_port()
    rig.start(
        *("celery", "-A", "tests.benchmarks.app", "delayed", "serve", "--port", str(port)),
        environment={BROKER: rig.url()},
        log=rig.directory / "http.log",
    )

    def answers() -> bool:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            return False
        return True

    wait_until(answers, "the API answers", 30)
    return port


def measure(rig: Rig) -> Figures:
    port = serve(rig)
    create_singly(port, 200)
    create_in_bulk(port, LINES)
    figures = {
        "single": rig.apart(create_singly, port, rig.scaled(20_000, 4_000)),
        "bulk": rig.apart(create_in_bulk, port, rig.scaled(200_000, 20_000)),
    }
    template = sample(rig)
    fill(store_of(rig), QUEUE, rig.scaled(1_000_000, 20_000), template)
    return {**figures, "p99_ms": rig.apart(look_up, port, rig.scaled(5_000, 500))}


def rows(ours: Figures) -> list[Row]:
    single, bulk, p99_ms = ours["single"], ours["bulk"], ours["p99_ms"]
    return [
        Row(
            "create over HTTP, one a request",
            "≥ 1,500/s",
            NOTHING,
            f"{single:,.0f}/s",
            NOTHING,
            single >= 1_500,
        ),
        Row("the same as NDJSON", "≥ 20,000/s", NOTHING, f"{bulk:,.0f}/s", NOTHING, bulk >= 20_000),
        Row(
            "p99 of `GET /v1/tasks/{id}`, 1,000,000 delayed",
            "≤ 10 ms",
            NOTHING,
            f"{p99_ms:.1f} ms",
            NOTHING,
            p99_ms <= 10,
        ),
    ]


BENCHMARKS = [Benchmark("http", measure, rows, sides=("ours",))]
