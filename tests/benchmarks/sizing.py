"""Server memory and time for a message by the length of its arguments, compared with the plan."""

from __future__ import annotations

import random
import statistics
import time

from kombu_delayed import sizing as planned
from kombu_delayed.connection.options import Options
from kombu_delayed.inspection.backlog import Backlog
from kombu_delayed.store.store import CALL_LIMIT, Store
from kombu_delayed.transport.server_checks import inspect
from tests.benchmarks.app import QUEUE
from tests.benchmarks.report import Figures, Line, benchmark
from tests.benchmarks.rig import Rig, entries, fill, sample
from tests.benchmarks.shards import one_node, server_us
from tests.kit.servers import available_kinds, start_server

PAYLOADS = (100, 300, 1_000, 10_000)
NEAR = 0.15
TURNS = 5


def memory(rig: Rig, payload: int, template: tuple[str, str]) -> Figures:
    """Bytes for each of many messages, and the resident ones after each was replaced by another.

    On a fresh server, of the first kind in $KOMBU_DELAYED_TEST_SERVERS: its allocator's rounding
    matters.
    """
    count, directory = rig.scaled(100_000, 10_000), rig.directory / f"memory-{payload}"
    with (
        start_server(available_kinds()[0], directory, port=0) as server,
        server.client() as client,
    ):
        store = Store(client, partition_size=inspect(client).partition_size)
        before = client.info("memory")
        fill(store, QUEUE, count, template)
        used = client.info("memory")["used_memory"] - before["used_memory"]
        churn(store, count, template)
        after = client.info("memory")
        resident = after["used_memory_rss"] - before["used_memory_rss"]
        jemalloc = str(after["mem_allocator"]).startswith("jemalloc")
        return {
            f"{payload} record": 1 + len(template[1]),
            f"{payload} used": used / count,
            f"{payload} resident": resident / (after["used_memory"] - before["used_memory"]),
            f"{payload} planned": planned.message_bytes(planned.record_bytes(payload), jemalloc),
        }


def churn(store: Store, count: int, template: tuple[str, str]) -> None:
    """Replace messages one by one at random until as many were replaced as there are."""
    chance, now_ms = random.Random(2), int(time.time() * 1000)
    backlog = Backlog(store, QUEUE)
    for _ in range(0, count, CALL_LIMIT):
        store.schedule(QUEUE, list(entries(CALL_LIMIT, template, chance, now_ms)))
        members = store.run("HRANDFIELD", store.keys(QUEUE).messages, CALL_LIMIT)
        backlog.cancel([member.decode() for member in members], members=True)


def _memory(payload: int) -> Line:
    def ratio(f: Figures) -> float:
        return f[f"{payload} planned"] / f[f"{payload} used"]

    return Line(
        f"a delayed task with {payload:,} B of arguments, a message of {{{payload} record:,.0f}} "
        "B: memory of the server, as planned (resident after churn)",
        f"{{{payload} used:,.0f}} B, {{{payload} planned:,.0f}} B (x {{{payload} resident:.2f}})",
        f"planned within {NEAR:.0%}",
        lambda f: f"{ratio(f):.2f}",
        lambda f: abs(ratio(f) - 1) <= NEAR,
    )


def _cpu(payload: int) -> Line:
    record, names = planned.record_bytes(payload), ("events", "none")
    us = {name: 1e6 / planned.node_rate(name == "events", record) for name in names}
    return Line(
        "the same through its life: processor time of the server, as planned; without events",
        "; ".join(f"{{{payload} {name}:.1f}} µs, {us[name]:.1f} µs" for name in names),
        ratio=lambda f: f"{max(us[name] / f[f'{payload} {name}'] for name in names):.2f}",
    )


@benchmark("sizing", *(make(payload) for payload in PAYLOADS for make in (_memory, _cpu)))
def sizing(rig: Rig) -> Figures:
    """The processor time is the median of turns, so that other load on the machine hits all."""
    moved, figures, spent = rig.scaled(5_000, 1_000), Figures(), dict[str, list[float]]()
    templates = {payload: sample(rig, payload) for payload in PAYLOADS}
    for payload, template in templates.items():
        figures |= memory(rig, payload, template)
    for _ in range(rig.scaled(TURNS, 1)):
        for payload, (_, text) in templates.items():
            for name, events in (("events", Options().events), ("none", 0)):
                nodes = one_node(rig, events)
                us = sum(server_us(nodes, nodes.shards(1), moved, text))
                spent.setdefault(f"{payload} {name}", []).append(us)
    return figures | {name: statistics.median(found) for name, found in spent.items()}
