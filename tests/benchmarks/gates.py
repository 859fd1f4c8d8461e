"""The cost of turns and limits, and the effect of a tenant that floods a queue on another one."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from celery import Celery

from kombu_delayed.message.ticket import Gate, LimitNumbers, Ticket, Use, put_ticket
from kombu_delayed.store.store import Entry, Store
from tests.benchmarks.app import GATE, OPTIONS, QUEUE, create_app
from tests.benchmarks.backlog import CALLS, TEMPLATE
from tests.benchmarks.report import Figures, Line, benchmark, percentile
from tests.benchmarks.rig import Rig, send_all, store_of
from tests.kit.clusters import start_cluster
from tests.kit.wait import wait_until

MOST_RATIO = 1.3
#: How many messages are measured together.
ROUND = 50

TENANTS, KEYS = 1_000, 10_000

#: The tenant beside the flood: tasks per second, and for how many seconds.
RATE, SECONDS = 10, 60
FLOOD = 100_000


@contextmanager
def set_environment(name: str, value: str) -> Iterator[None]:
    """Set a variable for this process, and for workers that are started meanwhile."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


@contextmanager
def gated(rig: Rig, name: str, url: str | None = None) -> Iterator[Celery]:
    """An app with these policies; workers that are started meanwhile have them, too."""
    rig.redis.flushall()
    with set_environment(GATE, name), create_app(url or rig.url()) as app:
        yield app


def check_allocator(rig: Rig) -> None:
    """The gate keeps many small pieces, and production servers have jemalloc.

    The bundled server has the C library's malloc, which a large fill makes slower.
    """
    allocator = rig.redis.info("memory")["mem_allocator"]
    if not allocator.startswith("jemalloc"):
        raise RuntimeError(f"the server's malloc is {allocator}: take one with jemalloc")


# A queue at its limit.


def serve(rig: Rig, store: Store, queue: str, limited: Gate, tags: range) -> float:
    """Microseconds of the server for a message, and for its slot."""
    rig.redis.config_resetstat()
    for tag in tags:
        answer = store.deliver(queue, "A", 1, tag, lease_ms=600_000, gate=limited)
        assert answer is not None
        assert len(answer.records) == 1
        store.free(queue, "A", [tag], on_error=lambda: None)
    store.run.settle()
    used: int = rig.redis.info("commandstats")["cmdstat_evalsha"]["usec"]
    return used / len(tags)


@benchmark(
    "gate-waiting",
    Line(
        "the server's time for each message delivered from a queue at its limit, with {few:,.0f} "
        "and {many:,.0f} waiting, on a Redis with jemalloc",
        "{few_us:,.0f}, {many_us:,.0f} µs",
        f"≤ {MOST_RATIO} × with {{few:,.0f}}",  # noqa: RUF001
        ("many_us", "few_us"),
        lambda f: f["many_us"] / f["few_us"] <= MOST_RATIO,
    ),
    Line(
        "the same, with {few:,.0f} on a server that has {many:,.0f} waiting in another queue",
        "{beside_us:,.0f}, {many_us:,.0f} µs",
        ratio=("many_us", "beside_us"),
    ),
    rounds=3,
    server="redis",
)
def gate_waiting(rig: Rig) -> Figures:
    """The last backlog is as small as the first, but the server has stored the large one before."""
    check_allocator(rig)
    few, many = rig.scaled((1_000, 1_000_000), (1_000, 20_000))
    sizes = {"few": few, "many": many, "beside": few}
    found = {f"{name}_us": _waiting_us(rig, f"of-{name}", size) for name, size in sizes.items()}
    return {**found, "few": few, "many": many}


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
    """Whether a fork of the server makes it copy each page that it writes to."""
    found = rig.redis.info("persistence")
    return bool(found["rdb_bgsave_in_progress"] or found["aof_rewrite_in_progress"])


def _entry(id: str, ticket: Ticket, due_ms: int) -> Entry:
    return Entry(id, 0, put_ticket(TEMPLATE[1], ticket.text("v", id)), str(due_ms))


# Throughput.


def drain(rig: Rig, name: str, count: int, keys: int, url: str | None = None) -> float:
    """Tasks per second through a worker with these policies."""
    with gated(rig, name, url) as app:
        send_all(app, (((), {"headers": {"tenant": str(n % keys)}}) for n in range(count)))
        return rig.drain(count, url=url)


def _throughput(name: str, what: str, least: float) -> Line:
    return Line(
        what,
        f"{{{name}:,.0f}}/s",
        f"≥ {least} × without",  # noqa: RUF001
        (name, "none"),
        lambda f: f[name] >= least * f["none"],
        "{none:,.0f}/s without",
    )


@benchmark(
    "gate-throughput",
    _throughput(
        "fair",
        f"tasks through one worker, with turns between {TENANTS:,} tenants, on a Redis with "
        "jemalloc",
        0.9,
    ),
    _throughput("keys", f"the same with a limit for each of {KEYS:,} keys", 0.85),
    server="redis",
)
def gate_throughput(rig: Rig) -> Figures:
    check_allocator(rig)
    count = rig.scaled(10_000, 3_000)
    keys = {"none": TENANTS, "fair": TENANTS, "keys": KEYS}
    return {name: drain(rig, name, count, keys[name]) for name in keys}


SHARDS, NODES = 12, 3


@benchmark(
    "gate-global",
    _throughput(
        "global",
        f"tasks through one worker, with a global limit over {SHARDS} shards on {NODES} nodes",
        0.7,
    ),
)
def gate_global(rig: Rig) -> Figures:
    """The limit is large enough for all tasks that the worker claims."""
    count, options = rig.scaled(10_000, 3_000), {"delayed_shards": {QUEUE: SHARDS}}
    with ExitStack() as stack:
        stack.enter_context(set_environment(OPTIONS, json.dumps(options)))
        directory = rig.directory / "cluster"
        cluster = stack.enter_context(
            start_cluster("valkey", directory, NODES, 0, append_only=False)
        )
        url = f"delayed+{cluster.url}"
        return {name: drain(rig, name, count, TENANTS, url) for name in ("none", "global")}


# A flood.


def lateness_ms(rig: Rig, flood: int) -> float:
    """The p99 lateness of a tenant's tasks while another tenant sends `flood` tasks."""
    seconds = rig.scaled(SECONDS, 10)
    with gated(rig, "fair") as app:
        worker = rig.start_worker().await_ready()
        begin = time.time() + 3 + flood / 5_000
        dues = (begin + 0.5 + n / RATE for n in range(seconds * RATE))
        send_all(app, (_of("flood", -1, begin) for _ in range(flood)))
        send_all(app, (_of("ada", n, due) for n, due in enumerate(dues)))
    time.sleep(max(begin + seconds + 3 - time.time(), 0))
    found = [1000 * (each.at - each.due) for each in worker.starts() if each.number >= 0]
    worker.kill()
    assert len(found) == seconds * RATE, f"{len(found)} have run"
    return percentile(found, 0.99)


def _of(tenant: str, number: int, due: float) -> tuple[Any, Any]:
    return (number, due), {"headers": {"tenant": tenant}, "countdown": due - time.time()}


@benchmark(
    "gate-flood",
    Line(
        f"p99 lateness of a tenant's {RATE} tasks a second while another one has {FLOOD:,} due",
        "{flooded:.1f} ms",
        "≤ 2 × alone",  # noqa: RUF001
        ("flooded", "alone"),
        lambda f: f["flooded"] / f["alone"] <= 2,
        "{alone:.1f} ms alone",
    ),
    rounds=1,
)
def gate_flood(rig: Rig) -> Figures:
    return {"alone": lateness_ms(rig, 0), "flooded": lateness_ms(rig, rig.scaled(FLOOD, 10_000))}
