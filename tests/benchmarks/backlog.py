"""Whether the cost of a call depends on how much is delayed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from time import perf_counter

from kombu_delayed.store.store import Entry, Store
from tests.benchmarks.fill import entries, fill, store_of
from tests.benchmarks.report import NOTHING, Benchmark, Figures, Row, medians
from tests.benchmarks.rig import Rig

LIMIT = 1.5
SMALL = 1_000
#: Short ones: millions of them are to fit, and their length does not matter here.
TEMPLATE = "ID", '{"body": "", "headers": {"id": "ID"}, "properties": {"delivery_tag": "ID"}}'
CONSUMER = "benchmark"
CALLS = 250


def timed(rig: Rig, call: Callable[[int], object]) -> tuple[float, float]:
    """Microseconds a call takes: in the server's script, and from here."""
    rig.redis.config_resetstat()
    began = perf_counter()
    for n in range(CALLS):
        call(n)
    client_us = (perf_counter() - began) / CALLS * 1e6
    return rig.redis.info("commandstats")["cmdstat_evalsha"]["usec_per_call"], client_us


def measure_queue(rig: Rig, store: Store, queue: str, seed: int) -> Figures:
    """Schedule messages one by one, all over the backlog; then deliver others one by one."""
    now_ms = int(time.time() * 1000)
    chance = random.Random(seed)
    far = list(entries(CALLS, TEMPLATE, chance, now_ms))
    soon_ms = now_ms + 60_000
    soon = [Entry(f"soon-{n}", 0, TEMPLATE[1], str(soon_ms + n)) for n in range(CALLS)]
    for entry in soon:  # one by one as well: what came before is not to weigh on what is timed
        store.schedule(queue, [entry])
    schedule = timed(rig, lambda n: store.schedule(queue, [far[n]]))
    # Due by the clock that the moves go by: one is promoted and handed out in each call.
    store.now = str(soon_ms + CALLS)
    deliver = timed(
        rig, lambda n: store.deliver(queue, CONSUMER, 1, n + 1, lease_ms=60_000, promotions=1)
    )
    rig.redis.delete(store.keys(queue).unacked(CONSUMER))
    store.now = ""
    store.leases.leave(queue, CONSUMER)
    return {
        f"schedule_{queue}_server_us": schedule[0],
        f"schedule_{queue}_client_us": schedule[1],
        f"deliver_{queue}_server_us": deliver[0],
        f"deliver_{queue}_client_us": deliver[1],
    }


def measure(rig: Rig) -> Figures:
    """Both backlogs on one server, in turn: whatever else the machine does falls on both."""
    large = rig.scaled(3_000_000, 100_000)
    store = store_of(rig)
    fill(store, "large", large, TEMPLATE)
    found = []
    for seed in range(rig.scaled(40, 10)):
        store.purge("small")
        fill(store, "small", SMALL, TEMPLATE)
        first, second = ("small", "large") if seed % 2 else ("large", "small")
        figures = measure_queue(rig, store, first, seed)
        found.append(figures | measure_queue(rig, store, second, seed))
    return {**medians(found), "large": large}


def rows(ours: Figures) -> list[Row]:
    return [_row(verb, ours) for verb in ("schedule", "deliver")]


def _row(verb: str, ours: Figures) -> Row:
    def pair(where: str) -> tuple[float, float]:
        return ours[f"{verb}_small_{where}_us"], ours[f"{verb}_large_{where}_us"]

    server, client = pair("server"), pair("client")
    ratios = server[1] / server[0], client[1] / client[0]
    return Row(
        f"{verb} one message at a backlog of {SMALL:,} and of {ours['large']:,.0f}: "
        "in the server, for the client",
        f"ratio ≤ {LIMIT}",
        NOTHING,
        f"{server[0]:.0f} and {server[1]:.0f} µs, {client[0]:.0f} and {client[1]:.0f} µs",
        f"{ratios[0]:.2f}, {ratios[1]:.2f}",
        max(ratios) <= LIMIT,
    )


BENCHMARKS = [Benchmark("backlog", measure, rows, sides=("ours",), rounds=1)]
