"""What the stream of lifecycle events costs."""

from __future__ import annotations

import json
from time import perf_counter

from kombu_delayed.connection.options import Options
from kombu_delayed.store.store import CALL_LIMIT, Entry, Store
from tests.benchmarks.app import OPTIONS, QUEUE
from tests.benchmarks.report import NOTHING, Benchmark, Figures, Row
from tests.benchmarks.rig import Rig
from tests.benchmarks.throughput import WARM_UP, publish
from tests.kit.state import message

DEFAULT = Options().events
PAYLOAD = "x" * 400


def through_a_worker(rig: Rig, count: int, limit: int) -> float:
    """Tasks per second that one worker gets through."""
    rig.redis.flushall()
    publish(rig, count)
    worker = rig.start_worker(environment={OPTIONS: json.dumps({"delayed_events": limit})})
    rig.await_done(count, 120, [worker])
    starts = worker.starts()
    worker.kill()
    return (count - WARM_UP) / (starts[-1].at - starts[WARM_UP - 1].at)


def in_the_server(rig: Rig, count: int, limit: int) -> float:
    """Messages per second that are scheduled, delivered and acked by nothing but scripts."""
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
        tags = range(tag, tag + CALL_LIMIT)
        store.ack(QUEUE, "me", tags, lambda: None)
    store.run("PING")
    return count / (perf_counter() - began)


def measure(rig: Rig) -> Figures:
    """Alternating, so that what else the machine does meets both."""
    tasks, messages = rig.scaled(6_000, 1_000), rig.scaled(50_000, 5_000)
    limits = {"off": 0, "on": DEFAULT}
    figures: Figures = {}
    for name in ("off", "on", "on", "off"):
        rate = through_a_worker(rig, tasks, limits[name])
        figures[f"worker {name}"] = figures.get(f"worker {name}", 0) + rate / 2
        rate = in_the_server(rig, messages, limits[name])
        figures[f"server {name}"] = figures.get(f"server {name}", 0) + rate / 2
    return figures


def rows(ours: Figures) -> list[Row]:
    worker = ours["worker on"] / ours["worker off"]
    server = ours["server on"] / ours["server off"]
    return [
        Row(
            f"tasks through one worker with the {DEFAULT:,} newest lifecycle events kept; without",
            "≥ 0.95 × without",  # noqa: RUF001
            NOTHING,
            f"{ours['worker on']:,.0f}/s; {ours['worker off']:,.0f}/s",
            f"{worker:.2f}",
            worker >= 0.95,
        ),
        Row(
            "messages scheduled, delivered and acked by scripts alone, with events; without",
            NOTHING,
            NOTHING,
            f"{ours['server on']:,.0f}/s; {ours['server off']:,.0f}/s",
            f"{server:.2f}",
        ),
    ]


BENCHMARKS = [Benchmark("events", measure, rows, sides=("ours",))]
