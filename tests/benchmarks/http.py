"""How many tasks the HTTP API accepts, and how soon it and the pages answer.

The server, Redis and the client share the machine. The client is one thread that waits on all its
connections at once, sends the same bytes again and looks at little of each answer.
"""

from __future__ import annotations

import json
import random
import selectors
import socket
import time
from collections import deque
from contextlib import closing
from time import perf_counter
from typing import Any

from celery_ext.app.outcome_options import OutcomeOptions
from kombu_delayed.store.outcomes.records import Note, Outcomes
from kombu_delayed.store.outcomes.tallies import Tallies
from kombu_delayed.store.store import Entry
from tests.benchmarks.app import BROKER, QUEUE
from tests.benchmarks.report import Figures, Line, benchmark
from tests.benchmarks.rig import Rig, cpu_seconds, fill, processor_seconds, sample, store_of
from tests.kit.servers import free_port
from tests.kit.wait import wait_until

CONNECTIONS = 32
LINES = 5_000
#: Look-ups per second, sent even if earlier ones are not answered.
STEADY = 500
#: Shared readings of a page are cached for less than this, or for 20 times the time of the read.
APART_SECONDS = 3.0


def _post(path: str, *tasks: Any) -> bytes:
    body = "\n".join(map(json.dumps, tasks)).encode()
    kind = "application/json" if len(tasks) == 1 else "application/x-ndjson"
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: {kind}\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


def _get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode()


class Connection:
    """Sends requests and reads answers, with little work of its own."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest = b""
        self.send, self.fileno = self._socket.sendall, self._socket.fileno
        self.close = self._socket.close

    def ask(self, request: bytes) -> float:
        """The seconds until the answer had arrived."""
        began = perf_counter()
        self.send(request)
        while not self.receive():
            pass
        return perf_counter() - began

    def receive(self) -> bool:
        """Read the available bytes; returns whether the answer is complete."""
        part = self._socket.recv(1 << 20)
        if not part:
            raise RuntimeError("the server has closed the connection")
        self._rest += part
        head, end, body = self._rest.partition(b"\r\n\r\n")
        if not end:
            return False
        if not head.startswith(b"HTTP/1.1 20"):
            raise RuntimeError(self._rest.decode())
        if len(body) < int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]):
            return False
        self._rest = b""
        return True


def create_singly(port: int, count: int) -> float:
    """Tasks per second, one request each, over several connections."""
    request = _post("/v1/tasks", {"task": "work", "delay": "1h"})
    connections = [Connection(port) for _ in range(CONNECTIONS)]
    selector = selectors.DefaultSelector()
    began = perf_counter()
    for connection in connections:
        selector.register(connection, selectors.EVENT_READ, connection)
        connection.send(request)
    sent, answered = len(connections), 0
    while answered < count:
        for key, _ in selector.select():
            if key.data.receive():
                answered += 1
                if sent < count:
                    sent += 1
                    key.data.send(request)
    seconds = perf_counter() - began
    for connection in connections:
        connection.close()
    return count / seconds


def create_in_bulk(port: int, count: int) -> float:
    """Tasks per second, with many per request."""
    request = _post("/v1/bulk", *[{"task": "work", "args": [1], "delay": "1h"}] * LINES)
    with closing(Connection(port)) as connection:
        return count / sum(connection.ask(request) for _ in range(count // LINES))


def look_up(port: int, count: int) -> float:
    """The 99th percentile of `GET /v1/tasks/{id}`, in ms."""
    with closing(Connection(port)) as connection:
        connection.ask(_post("/v1/tasks", {"task": "work", "id": "known", "delay": "1h"}))
        took = [connection.ask(_get("/v1/tasks/known")) for _ in range(count)]
    return 1000 * sorted(took)[int(count * 0.99)]


def look_up_ready(port: int, ready: int, count: int, connections: int) -> dict[str, float]:
    """Percentiles of `GET /v1/tasks/{id}` of ready tasks, in ms, with this many clients."""
    chance = random.Random(7)
    selector, took = selectors.DefaultSelector(), []
    clients = [Connection(port) for _ in range(connections)]
    clients[0].ask(_get("/v1/tasks/ready-0"))  # the first look-up reads the ready list
    began = dict[Connection, float]()

    def ask(client: Connection) -> None:
        began[client] = perf_counter()
        client.send(_get(f"/v1/tasks/ready-{chance.randrange(ready)}"))

    for client in clients:
        selector.register(client, selectors.EVENT_READ, client)
        ask(client)
    start = perf_counter()
    while len(took) < count:
        for key, _ in selector.select():
            if key.data.receive():
                took.append(perf_counter() - began[key.data])
                ask(key.data)
    rate = count / (perf_counter() - start)
    for client in clients:
        client.close()
    took.sort()
    p50, p99 = (1000 * took[int(count * share)] for share in (0.5, 0.99))
    return {"p50": p50, "p99": p99, "rate": rate}


def look_up_steadily(port: int, ready: int, count: int, rate: float) -> float:
    """The 99th percentile of look-ups of ready tasks at a rate, in ms, from when each was due.

    They are sent when due, even if earlier ones are not answered.
    """
    chance, selector, took = random.Random(7), selectors.DefaultSelector(), list[float]()
    # In turn, because the server closes a connection that is idle for long.
    free = deque(Connection(port) for _ in range(CONNECTIONS))
    for client in free:
        selector.register(client, selectors.EVENT_READ, client)
    due, sent, began = dict[Connection, float](), 0, perf_counter()
    while len(took) < count:
        at = began + sent / rate
        while sent < count and free and at <= perf_counter():
            client = free.popleft()
            due[client] = at
            client.send(_get(f"/v1/tasks/ready-{chance.randrange(ready)}"))
            sent, at = sent + 1, began + (sent + 1) / rate
        for key, _ in selector.select(max(at - perf_counter(), 0) if free else None):
            if key.data.receive():
                took.append(perf_counter() - due[key.data])
                free.append(key.data)
    for client in free:
        client.close()
    return 1000 * sorted(took)[int(count * 0.99)]


def open_pages(port: int, path: str, count: int) -> float:
    """The time of the slowest of some visits, in ms, each with a fresh read."""
    took = []
    for _ in range(count):
        began = perf_counter()
        with closing(Connection(port)) as connection:
            connection.ask(_get(path))
            took.append(perf_counter() - began)
        time.sleep(max(APART_SECONDS, 21 * took[-1]))
    return 1000 * max(took)


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


def _rate(what: str, name: str, least: int) -> Line:
    reached = lambda f: f[name] >= least  # noqa: E731
    return Line(what, f"{{{name}:,.0f}}/s", f"≥ {least:,}/s", reached=reached)


def _time(what: str, name: str, most: int) -> Line:
    reached = lambda f: f[name] <= most  # noqa: E731
    return Line(what, f"{{{name}:.1f}} ms", f"≤ {most} ms", reached=reached)


@benchmark(
    "http",
    _rate("create over HTTP, one a request", "single", 1_500),
    _rate("the same as NDJSON", "bulk", 20_000),
    _time("p99 of `GET /v1/tasks/{{id}}`, 1,000,000 delayed", "p99_ms", 10),
)
def http(rig: Rig) -> Figures:
    port = serve(rig)
    create_singly(port, 200)
    create_in_bulk(port, LINES)
    figures = {
        "single": rig.apart(create_singly, port, rig.scaled(20_000, 4_000)),
        "bulk": rig.apart(create_in_bulk, port, rig.scaled(200_000, 20_000)),
    }
    fill(store_of(rig), QUEUE, rig.scaled(1_000_000, 20_000), sample(rig))
    return {**figures, "p99_ms": rig.apart(look_up, port, rig.scaled(5_000, 500))}


@benchmark(
    "lookups",
    _time("p99 of `GET /v1/tasks/{{id}}` of one of {count:,.0f} ready tasks", "one", 10),
    Line(
        "the same by 32 clients at once, each of which asks again when it is answered: p50, p99, "
        "look-ups a second",
        "{p50:.1f}, {many:.1f} ms, {rate:,.0f}/s",
        "p99 ≤ 10 ms",
        reached=lambda f: f["many"] <= 10,
    ),
    Line(
        "the same with 32 clients: processor time of a look-up in the server process, in Redis",
        "{cpu_us:.0f} µs, {redis_us:.0f} µs",
    ),
    _time(f"the same at {STEADY} look-ups a second over 32 connections", "steady", 10),
)
def lookups(rig: Rig) -> Figures:
    """Look-ups of ready tasks, beside 1,000,000 delayed ones."""
    count, store = rig.scaled(100_000, 5_000), store_of(rig)
    template = sample(rig)
    fill(store, QUEUE, rig.scaled(1_000_000, 20_000), template)
    ids = [f"ready-{n}" for n in range(count)]
    text = json.loads(template[1])
    text["headers"]["eta"] = None
    for at in range(0, count, 1_000):
        entries = []
        for id in ids[at : at + 1_000]:
            text["headers"]["id"] = text["properties"]["correlation_id"] = id
            entries.append(Entry(id, 0, json.dumps(text)))
        store.publish(QUEUE, entries)
    port, asked = serve(rig), rig.scaled(20_000, 1_000)
    one = rig.apart(look_up_ready, port, count, asked // 4, 1)
    process = rig.started[-1]
    before = processor_seconds(process.pid), cpu_seconds(rig.redis)
    many = rig.apart(look_up_ready, port, count, asked, CONNECTIONS)
    took = processor_seconds(process.pid) - before[0], cpu_seconds(rig.redis) - before[1]
    steady = rig.apart(look_up_steadily, port, count, asked // 2, float(STEADY))
    return {
        "count": float(count),
        "one": one["p99"],
        "many": many["p99"],
        "p50": many["p50"],
        "rate": many["rate"],
        "cpu_us": took[0] / asked * 1e6,
        "redis_us": took[1] / asked * 1e6,
        "steady": steady,
    }


#: The pages, and the query of each.
PAGES = {
    "overview": "/?ahead=month",
    "failures": "/failures",
    "running": "/failures?of=running",
    "trends": "/trends?within=week",
    "backlog": "/backlog",
    "ready": "/backlog?state=ready",
    "search": "/backlog?task=rare.*",
    "arguments": "/backlog?where=args.0+==+rare",
    "task": "/task?id=known",
    "dead letters": "/dead",
    "tenants": "/tenants",
    "policies": "/policies",
    "periodic": "/periodic",
    "consumers": "/consumers",
    "partitions": "/partitions",
}


def finish(rig: Rig, count: int) -> None:
    """Record tasks as workers do: all have succeeded except one in a hundred."""
    store, now_ms = store_of(rig), int(time.time() * 1000)
    outcomes, kept = Outcomes(store), OutcomeOptions().kept
    worker = "w1@benchmarks:7:ab"
    for at in range(0, count, LINES):
        notes, tallies = [], Tallies()
        for n in range(at, at + LINES):
            ended = now_ms - (count - n) // 10
            state = "-" if n % 100 == 0 else "+"
            last = '{"error":"ValueError","message":"no","run_ms":5}' if state == "-" else "5"
            lines = f'["r",{ended - 9},0,"{worker}"]\n["s",{ended - 5},0,"{worker}",7,0]\n'
            lines += f'["{state}",{ended},0,{last}]\n'
            notes.append(Note(f"done-{n}", state, ended, False, '["t","work",null]\n', lines))
            tallies.ended("work", ended / 1000, state, 5)
        calls = outcomes.note_calls(QUEUE, notes, kept, worker)
        store.all_of([*calls, *tallies.calls(store, QUEUE, worker)])


def _slowest(f: Figures) -> str:
    found = sorted(((f[name], name) for name in PAGES), reverse=True)
    return ", ".join(f"{name} {ms:.0f}" for ms, name in found) + " ms"


@benchmark(
    "pages",
    Line(
        "the slowest of some visits to each page, with {count:,.0f} delayed and as many finished",
        _slowest,
        "≤ 200 ms",
        reached=lambda f: all(f[name] <= 200 for name in PAGES),
    ),
)
def pages(rig: Rig) -> Figures:
    count = rig.scaled(1_000_000, 50_000)
    fill(store_of(rig), QUEUE, count, sample(rig))
    finish(rig, count)
    rig.app.tasks["work"].apply_async((1,), countdown=3600, task_id="known")
    port, visits = serve(rig), rig.scaled(6, 1)
    found = {
        name: rig.apart(open_pages, port, path, visits, seconds=300) for name, path in PAGES.items()
    }
    return {"count": float(count), **found}
