"""The cost of a backlog for the server, and whether the cost of a call depends on its size."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from time import perf_counter

from kombu_delayed.store.store import Entry, Store
from tests.benchmarks.app import QUEUE
from tests.benchmarks.report import Figures, Line, benchmark, medians
from tests.benchmarks.rig import Rig, entries, fill, sample, store_of

LIMIT_BYTES = 165
LIMIT, SMALL, CALLS = 1.5, 1_000, 250
#: Short messages: millions of them should fit, and their length does not matter here.
TEMPLATE = "ID", '{"body": "", "headers": {"id": "ID"}, "properties": {"delivery_tag": "ID"}}'
CONSUMER = "benchmark"
QUEUES = "small", "large"

DAY_MS = 86_400_000
LIMIT_US = 2_000


@benchmark(
    "bookkeeping",
    Line(
        "server memory for each of {count:,.0f} delayed messages, beyond its own "
        "{record_bytes:.0f} B",
        "{bytes:.0f} B",
        f"≤ {LIMIT_BYTES} B",
        reached=lambda f: f["bytes"] <= LIMIT_BYTES,
    ),
    rounds=1,
)
def bookkeeping(rig: Rig) -> Figures:
    count, template = rig.scaled(1_000_000, 50_000), sample(rig)
    before = rig.redis.info("memory")["used_memory"]
    fill(store_of(rig), QUEUE, count, template)
    growth = rig.redis.info("memory")["used_memory"] - before
    record_bytes = 1 + len(template[1])
    return {"bytes": growth / count - record_bytes, "record_bytes": record_bytes, "count": count}


def timed(rig: Rig, call: Callable[[int], object]) -> tuple[float, float]:
    """Microseconds of a call: in the server's script, and as seen from here."""
    rig.redis.config_resetstat()
    began = perf_counter()
    for n in range(CALLS):
        call(n)
    client_us = (perf_counter() - began) / CALLS * 1e6
    return rig.redis.info("commandstats")["cmdstat_evalsha"]["usec_per_call"], client_us


def measure_queue(rig: Rig, store: Store, queue: str, seed: int) -> Figures:
    """Schedule messages one by one, all over the backlog; then deliver others one by one."""
    now_ms = int(time.time() * 1000)
    far = list(entries(CALLS, TEMPLATE, random.Random(seed), now_ms))
    soon_ms = now_ms + 60_000
    for n in range(CALLS):  # one by one: earlier calls should not affect the timing
        store.schedule(queue, [Entry(f"soon-{n}", 0, TEMPLATE[1], str(soon_ms + n))])
    schedule = timed(rig, lambda n: store.schedule(queue, [far[n]]))
    # Due by the clock that the moves use: each call promotes and hands out one message.
    store.now = str(soon_ms + CALLS)
    deliver = timed(
        rig, lambda n: store.deliver(queue, CONSUMER, 1, n + 1, lease_ms=60_000, promotions=1)
    )
    rig.redis.delete(store.keys(queue).unacked(CONSUMER))
    store.now = ""
    store.leases.leave(queue, CONSUMER)
    found = {"schedule": schedule, "deliver": deliver}
    return {
        f"{verb}_{queue}_{where}_us": us
        for verb, times in found.items()
        for where, us in zip(("server", "client"), times, strict=True)
    }


def _cost(verb: str) -> Line:
    def ratio(f: Figures, where: str) -> float:
        return f[f"{verb}_large_{where}_us"] / f[f"{verb}_small_{where}_us"]

    shown = [f"{{{verb}_{size}_{w}_us:.0f}}" for w in ("server", "client") for size in QUEUES]
    return Line(
        f"{verb} one message at a backlog of {SMALL:,} and of {{large:,.0f}}: in the server, for "
        "the client",
        "{} and {} µs, {} and {} µs".format(*shown),
        f"ratio ≤ {LIMIT}",
        lambda f: f"{ratio(f, 'server'):.2f}, {ratio(f, 'client'):.2f}",
        lambda f: max(ratio(f, "server"), ratio(f, "client")) <= LIMIT,
    )


@benchmark("backlog", _cost("schedule"), _cost("deliver"), rounds=1)
def backlog(rig: Rig) -> Figures:
    """Both backlogs take turns on one server, so that other load on the machine hits both."""
    large = rig.scaled(3_000_000, 100_000)
    store = store_of(rig)
    fill(store, "large", large, TEMPLATE)
    found = []
    for seed in range(rig.scaled(40, 10)):
        store.purge("small")
        fill(store, "small", SMALL, TEMPLATE)
        first, second = QUEUES if seed % 2 else QUEUES[::-1]
        figures = measure_queue(rig, store, first, seed)
        found.append(figures | measure_queue(rig, store, second, seed))
    return {**medians(found), "large": large}


@benchmark(
    "metrics",
    Line(
        "`metrics` of a queue with {size_0:,.0f}, {size_1:,.0f} and {size_2:,.0f} messages due "
        "within a day, in the server",
        "{0_us:,.0f}, {1_us:,.0f}, {2_us:,.0f} µs",
        f"≤ {LIMIT_US:,} µs",
        ("2_us", "1_us"),
        lambda f: f["2_us"] <= LIMIT_US,
    ),
    rounds=1,
)
def metrics(rig: Rig) -> Figures:
    store, figures = store_of(rig), {}
    store.now = "1000"
    sizes = rig.scaled((1_000, 100_000, 1_000_000), (100, 1_000, 20_000))
    for n, size in enumerate(sizes):
        fill_day(store, f"of-{n}", size)
        us, _ = timed(rig, lambda _, n=n: store.metrics(f"of-{n}"))
        figures |= {f"{n}_us": us, f"size_{n}": size}
    return figures


def fill_day(store: Store, queue: str, count: int) -> None:
    """Messages due evenly over the coming day, so that each is in one of the counts."""
    step_ms = DAY_MS / count
    for first in range(0, count, 1_000):
        numbers = range(first, min(first + 1_000, count))
        store.schedule(
            queue, [Entry(f"{n}", 0, TEMPLATE[1], f"{1_000 + n * step_ms:.0f}") for n in numbers]
        )
