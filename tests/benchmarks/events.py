"""The cost of the stream of lifecycle events."""

from __future__ import annotations

import json
from time import perf_counter

from kombu_delayed.connection.options import Options
from kombu_delayed.store.store import CALL_LIMIT, Entry, Store
from tests.benchmarks.app import OPTIONS, QUEUE
from tests.benchmarks.report import Figures, Line, benchmark
from tests.benchmarks.rig import Rig
from tests.kit.state import message

DEFAULT = Options().events
PAYLOAD = "x" * 400


def through_a_worker(rig: Rig, count: int, limit: int) -> float:
    """Tasks per second that one worker processes."""
    rig.redis.flushall()
    rig.send(((), {}) for _ in range(count))
    return rig.drain(count, environment={OPTIONS: json.dumps({"delayed_events": limit})})


def in_the_server(rig: Rig, count: int, limit: int) -> float:
    """Messages per second that scripts alone schedule, deliver and ack."""
    rig.redis.flushall()
    store = Store(rig.redis, event_limit=limit, now="1000")
    headers = {"lang": "py", "task": "work", "id": "id", "argsrepr": PAYLOAD[:100]}
    entries = [
        Entry(f"{n}", 0, message(PAYLOAD, headers={**headers, "id": f"{n}"}), "2000")
        for n in range(count)
    ]
    began = perf_counter()
    store.schedule(QUEUE, entries)
    store.now = "3000"
    for tag in range(1, count + 1, CALL_LIMIT):
        store.deliver(QUEUE, "me", CALL_LIMIT, tag, lease_ms=30_000, waits=False)
        store.ack(QUEUE, "me", range(tag, tag + CALL_LIMIT), lambda: None)
    store.run("PING")
    return count / (perf_counter() - began)


@benchmark(
    "events",
    Line(
        f"tasks through one worker with the {DEFAULT:,} newest lifecycle events kept; without",
        "{worker on:,.0f}/s; {worker off:,.0f}/s",
        "≥ 0.95 × without",  # noqa: RUF001
        ("worker on", "worker off"),
        lambda f: f["worker on"] / f["worker off"] >= 0.95,
    ),
    Line(
        "messages scheduled, delivered and acked by scripts alone, with events; without",
        "{server on:,.0f}/s; {server off:,.0f}/s",
        ratio=("server on", "server off"),
    ),
)
def events(rig: Rig) -> Figures:
    """The sides alternate, so that other load on the machine hits both."""
    tasks, messages = rig.scaled(6_000, 1_000), rig.scaled(50_000, 5_000)
    figures: Figures = dict.fromkeys(("worker off", "worker on", "server off", "server on"), 0.0)
    for name in ("off", "on", "on", "off"):
        limit = DEFAULT if name == "on" else 0
        figures[f"worker {name}"] += through_a_worker(rig, tasks, limit) / 2
        figures[f"server {name}"] += in_the_server(rig, messages, limit) / 2
    return figures
