"""What a message costs a server by the length of its task's arguments, and what is planned with."""

from __future__ import annotations

import random
import statistics
import time
from functools import partial

from kombu_delayed import sizing
from kombu_delayed.connection.options import Options
from kombu_delayed.inspection.backlog import Backlog
from kombu_delayed.store.store import CALL_LIMIT, Store
from kombu_delayed.transport.server_checks import inspect
from tests.benchmarks.app import QUEUE
from tests.benchmarks.fill import entries, fill, sample
from tests.benchmarks.load import Load, OneNode
from tests.benchmarks.report import NOTHING, Benchmark, Figures, Row
from tests.benchmarks.rig import Rig
from tests.kit.servers import available_kinds, start_server

PAYLOADS = (100, 300, 1_000, 10_000)
NEAR = 0.15
TURNS = 5


def memory(rig: Rig, payload: int, template: tuple[str, str]) -> Figures:
    """Bytes for each of many messages, and what is resident when each has given way to another.

    On a fresh server, of the first kind in $KOMBU_DELAYED_TEST_SERVERS: what counts is how the
    allocator rounds.
    """
    count = rig.scaled(100_000, 10_000)
    kind = available_kinds()[0]
    with (
        start_server(kind, rig.directory / f"memory-{payload}", port=0) as server,
        server.client() as client,
    ):
        store = Store(client, partition_size=inspect(client).partition_size)
        before = client.info("memory")
        fill(store, QUEUE, count, template)
        used = client.info("memory")["used_memory"] - before["used_memory"]
        churn(store, count, template)
        after = client.info("memory")
        resident = after["used_memory_rss"] - before["used_memory_rss"]
        record_bytes = 1 + len(template[1])
        jemalloc = str(after["mem_allocator"]).startswith("jemalloc")
        return {
            "record": record_bytes,
            "used": used / count,
            "resident": resident / (after["used_memory"] - before["used_memory"]),
            "planned": sizing.message_bytes(sizing.record_bytes(payload), jemalloc),
        }


def churn(store: Store, count: int, template: tuple[str, str]) -> None:
    """Let as many messages go as there are, at random, while as many come."""
    chance, now_ms = random.Random(2), int(time.time() * 1000)
    backlog = Backlog(store, QUEUE)
    for _ in range(0, count, CALL_LIMIT):
        store.schedule(QUEUE, list(entries(CALL_LIMIT, template, chance, now_ms)))
        members = store.run("HRANDFIELD", store.keys(QUEUE).messages, CALL_LIMIT)
        backlog.cancel([member.decode() for member in members], members=True)


def cpu_us(rig: Rig, count: int, text: str, events: int) -> float:
    nodes = OneNode(rig, events)
    return sum(Load(nodes, nodes.shards(1), count, text).run())


def measure(rig: Rig) -> Figures:
    """The processor time is the median of turns: what else the machine does meets all in turn."""
    moved, turns = rig.scaled(5_000, 1_000), rig.scaled(TURNS, 1)
    templates = {payload: sample(rig, payload) for payload in PAYLOADS}
    figures: Figures = {}
    for payload, template in templates.items():
        found = memory(rig, payload, template)
        figures |= {f"{payload} {name}": value for name, value in found.items()}
    spent: dict[str, list[float]] = {}
    for _ in range(turns):
        for payload, (_, text) in templates.items():
            for name, events in (("events", Options().events), ("none", 0)):
                us = cpu_us(rig, moved, text, events)
                spent.setdefault(f"{payload} {name}", []).append(us)
    return figures | {name: statistics.median(found) for name, found in spent.items()}


def memory_row(payload: int, ours: Figures) -> list[Row]:
    record, used, resident, planned = (
        ours[f"{payload} {name}"] for name in ("record", "used", "resident", "planned")
    )
    return [
        Row(
            f"a delayed task with {payload:,} B of arguments, a message of {record:,.0f} B: "
            "memory of the server, as planned (resident after churn)",
            f"planned within {NEAR:.0%}",
            NOTHING,
            f"{used:,.0f} B, {planned:,.0f} B (x {resident:.2f})",
            f"{planned / used:.2f}",
            abs(planned / used - 1) <= NEAR,
        )
    ]


def cpu_row(payload: int, ours: Figures) -> list[Row]:
    record = sizing.record_bytes(payload)
    us = {name: ours[f"{payload} {name}"] for name in ("events", "none")}
    planned = {name: 1e6 / sizing.node_rate(name == "events", record) for name in us}
    ratio = max(planned[name] / us[name] for name in us)
    return [
        Row(
            "the same through its life: processor time of the server, as planned; without events",
            NOTHING,
            NOTHING,
            "; ".join(f"{us[name]:.1f} µs, {planned[name]:.1f} µs" for name in us),
            f"{ratio:.2f}",
        )
    ]


def rows(ours: Figures) -> list[Row]:
    makers = [partial(make, payload) for payload in PAYLOADS for make in (memory_row, cpu_row)]
    return [row for make in makers for row in make(ours)]


BENCHMARKS = [Benchmark("sizing", measure, rows, sides=("ours",))]
