"""Whether the cost of a call depends on how much is delayed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from time import perf_counter

from kombu_delayed.store import Entry, Store
from tests.benchmarks.app import QUEUE
from tests.benchmarks.fill import entries, fill, store_of
from tests.benchmarks.report import NOTHING, Benchmark, Figures, Row
from tests.benchmarks.rig import Rig

LIMIT = 1.5
SMALL = 1_000
#: Short ones: millions of them are to fit, and their length does not matter here.
TEMPLATE = "ID", '{"body": "", "headers": {"id": "ID"}, "properties": {"delivery_tag": "ID"}}'
CONSUMER = "benchmark"


def timed(rig: Rig, calls: int, call: Callable[[], object]) -> tuple[float, float]:
    """Microseconds a call takes: in the server's script, and from here."""
    call()
    rig.redis.config_resetstat()
    began = perf_counter()
    for _ in range(calls):
        call()
    client_us = (perf_counter() - began) / calls * 1e6
    return rig.redis.info("commandstats")["cmdstat_evalsha"]["usec_per_call"], client_us


def measure_at(rig: Rig, store: Store, calls: int, name: str) -> Figures:
    chance = random.Random(2)
    now_ms = int(time.time() * 1000)

    def schedule() -> None:
        store.schedule(QUEUE, list(entries(1, TEMPLATE, chance, now_ms)))

    figures = dict(zip(_names("schedule", name), timed(rig, calls, schedule), strict=True))
    soon_ms = now_ms + 60_000
    due = [Entry(f"due-{name}-{n}", 0, TEMPLATE[1], str(soon_ms + n)) for n in range(calls + 1)]
    store.schedule(QUEUE, due)
    # Due by the clock that the moves go by: one is promoted and handed out in each call.
    store.now = str(soon_ms + calls + 1)
    tags = iter(range(1, calls + 2))

    def deliver() -> None:
        store.deliver(QUEUE, CONSUMER, 1, next(tags), lease_ms=60_000, promotions=1)

    figures |= zip(_names("deliver", name), timed(rig, calls, deliver), strict=True)
    store.now = ""
    store.leave(QUEUE, CONSUMER)
    return figures


def _names(verb: str, name: str) -> tuple[str, str]:
    return f"{verb}_{name}_server_us", f"{verb}_{name}_client_us"


def measure(rig: Rig) -> Figures:
    large, calls = rig.scaled(3_000_000, 100_000), rig.scaled(5_000, 1_000)
    store = store_of(rig)
    fill(store, SMALL, TEMPLATE)
    figures = measure_at(rig, store, calls, "small")
    fill(store, large - SMALL, TEMPLATE)
    return {**figures, **measure_at(rig, store, calls, "large"), "large": large}


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
