"""What turns and limits cost, and what a tenant that floods a queue does to another one."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kombu_delayed.message.ticket import Gate, LimitNumbers, Ticket, Use, put_ticket
from kombu_delayed.store.store import Entry, Store
from tests.benchmarks.app import GATE, batch, create_app
from tests.benchmarks.backlog import CALLS, TEMPLATE
from tests.benchmarks.fill import store_of
from tests.benchmarks.report import NOTHING, Benchmark, Figures, Row, percentile
from tests.benchmarks.rig import Rig
from tests.benchmarks.throughput import WARM_UP
from tests.kit.wait import wait_until

SIZES = (1_000, 1_000_000)
QUICK_SIZES = (1_000, 20_000)
MOST_RATIO = 1.3
BESIDE = "beside"
#: Messages that are measured together.
ROUND = 50

TENANTS, KEYS = 1_000, 10_000
LEAST = {"fair": 0.85, "keys": 0.8}

#: Of the tenant beside the flood: tasks a second, and for how long.
RATE, SECONDS = 10, 60
FLOOD = 100_000


@contextmanager
def gate(name: str) -> Iterator[None]:
    """Let apps that are made meanwhile, also in workers, have these policies."""
    os.environ[GATE] = name
    try:
        yield
    finally:
        del os.environ[GATE]


def check_allocator(rig: Rig) -> None:
    """What the gate keeps is in many small pieces, and servers for production have jemalloc.

    The bundled one has the C library's malloc, which becomes slower by a large fill.
    """
    allocator = rig.redis.info("memory")["mem_allocator"]
    if not allocator.startswith("jemalloc"):
        raise RuntimeError(f"the server's malloc is {allocator}: take one with jemalloc")


# A queue at its limit.


def serve(rig: Rig, store: Store, queue: str, limited: Gate, tags: range) -> float:
    """Microseconds of the server for one message, and for its slot."""
    rig.redis.config_resetstat()
    for tag in tags:
        answer = store.deliver(queue, "A", 1, tag, lease_ms=600_000, gate=limited)
        assert answer is not None
        assert len(answer.records) == 1
        store.free(queue, "A", [tag], on_error=lambda: None)
    store.run.settle()
    used: int = rig.redis.info("commandstats")["cmdstat_evalsha"]["usec"]
    return used / len(tags)


def measure_waiting(rig: Rig) -> Figures:
    """The last one is as small as the first, on a server that has had the large one to store."""
    check_allocator(rig)
    few, many = rig.scaled(SIZES, QUICK_SIZES)
    sizes = {f"{few:,}": few, f"{many:,}": many, BESIDE: few}
    return {name: _waiting_us(rig, f"of-{name}", size) for name, size in sizes.items()}


def _waiting_us(rig: Rig, queue: str, size: int) -> float:
    store, ticket = store_of(rig), Ticket(uses=(Use("all"),))
    limited = Gate("v", (LimitNumbers("all", 1),))
    for first in range(0, size, 500):
        numbers = range(first, min(first + 500, size))
        store.now = "1"
        store.schedule(queue, [_entry(f"{n}", ticket, 1_000 + n) for n in numbers])
        store.now = "1000000000"
        store.deliver(queue, "A", 0, 1, lease_ms=600_000, gate=limited, promotions=1_000)
    wait_until(lambda: not _is_saving(rig), "the server has saved what was filled in", 60)
    return statistics.median(
        serve(rig, store, queue, limited, range(first, first + ROUND))
        for first in range(1, CALLS + 1, ROUND)
    )


def _is_saving(rig: Rig) -> bool:
    """Whether a fork of the server makes each page that it writes to a copy."""
    found = rig.redis.info("persistence")
    return bool(found["rdb_bgsave_in_progress"] or found["aof_rewrite_in_progress"])


def _entry(id: str, ticket: Ticket, due_ms: int) -> Entry:
    return Entry(id, 0, put_ticket(TEMPLATE[1], ticket.text("v", id)), str(due_ms))


def rows_waiting(ours: Figures) -> list[Row]:
    few, many, _ = ours
    ratio, own = ours[many] / ours[few], ours[many] / ours[BESIDE]
    return [
        Row(
            f"the server's time for each message delivered from a queue at its limit, with {few} "
            f"and {many} waiting, on a Redis with jemalloc",
            f"≤ {MOST_RATIO} × with {few}",  # noqa: RUF001
            NOTHING,
            f"{ours[few]:,.0f}, {ours[many]:,.0f} µs",
            f"{ratio:.2f}",
            ratio <= MOST_RATIO,
        ),
        Row(
            f"the same, with {few} on a server that has {many} waiting in another queue",
            NOTHING,
            NOTHING,
            f"{ours[BESIDE]:,.0f}, {ours[many]:,.0f} µs",
            f"{own:.2f}",
        ),
    ]


# Throughput.


def drain(rig: Rig, name: str, count: int, keys: int) -> float:
    """Tasks a second through a worker with these policies; all are there before it starts."""
    rig.redis.flushall()
    with gate(name):
        app = create_app(rig.url())
        with batch(app) as options:
            for n in range(count):
                headers = {"tenant": str(n % keys)}
                app.tasks["work"].apply_async(headers=headers, **options)
        app.close()
        worker = rig.start_worker()
    rig.await_done(count, 120, [worker])
    starts = worker.starts()
    worker.kill()
    return (count - WARM_UP) / (starts[-1].at - starts[WARM_UP - 1].at)


def measure_throughput(rig: Rig) -> Figures:
    check_allocator(rig)
    count = rig.scaled(10_000, 3_000)
    return {
        "none": drain(rig, "", count, TENANTS),
        "fair": drain(rig, "fair", count, TENANTS),
        "keys": drain(rig, "keys", count, KEYS),
    }


def rows_throughput(ours: Figures) -> list[Row]:
    whats = {
        "fair": f"tasks through one worker, with turns between {TENANTS:,} tenants, on a Redis "
        "with jemalloc",
        "keys": f"the same with a limit for each of {KEYS:,} keys",
    }
    return [
        Row(
            what,
            f"≥ {LEAST[name]} × without",  # noqa: RUF001
            f"{ours['none']:,.0f}/s without",
            f"{ours[name]:,.0f}/s",
            f"{ours[name] / ours['none']:.2f}",
            ours[name] >= LEAST[name] * ours["none"],
        )
        for name, what in whats.items()
    ]


# A flood.


def lateness_ms(rig: Rig, flood: int) -> float:
    """The 99th percentile of the lateness of a tenant's tasks, beside so many of another one's."""
    rig.redis.flushall()
    seconds = rig.scaled(SECONDS, 10)
    with gate("fair"):
        app = create_app(rig.url())
        worker = rig.start_worker()
    worker.await_ready()
    begin = time.time() + 3 + flood / 5_000
    send: Callable[..., object] = app.tasks["work"].apply_async
    with batch(app) as options:
        for _ in range(flood):
            send((-1, begin), headers={"tenant": "flood"}, countdown=begin - time.time(), **options)
        for n in range(seconds * RATE):
            due = begin + 0.5 + n / RATE
            send((n, due), headers={"tenant": "ada"}, countdown=due - time.time(), **options)
    app.close()
    time.sleep(max(begin + seconds + 3 - time.time(), 0))
    found = [1000 * (each.at - each.due) for each in worker.starts() if each.number >= 0]
    worker.kill()
    assert len(found) == seconds * RATE, f"{len(found)} have run"
    return percentile(found, 0.99)


def measure_flood(rig: Rig) -> Figures:
    return {"alone": lateness_ms(rig, 0), "flooded": lateness_ms(rig, rig.scaled(FLOOD, 10_000))}


def rows_flood(ours: Figures) -> list[Row]:
    ratio = ours["flooded"] / ours["alone"]
    return [
        Row(
            f"p99 lateness of a tenant's {RATE} tasks a second while another one has {FLOOD:,} due",
            "≤ 2 × alone",  # noqa: RUF001
            f"{ours['alone']:.1f} ms alone",
            f"{ours['flooded']:.1f} ms",
            f"{ratio:.2f}",
            ratio <= 2,
        )
    ]


BENCHMARKS = [
    Benchmark(
        "gate-waiting", measure_waiting, rows_waiting, sides=("ours",), rounds=3, server="redis"
    ),
    Benchmark(
        "gate-throughput", measure_throughput, rows_throughput, sides=("ours",), server="redis"
    ),
    Benchmark("gate-flood", measure_flood, rows_flood, sides=("ours",), rounds=1),
]
