"""What a killed worker costs the tasks that are not due yet."""

from __future__ import annotations

import time

import redis

from kombu_delayed.store.store import Store
from tests.benchmarks.app import QUEUE
from tests.benchmarks.bulk import probed
from tests.benchmarks.bursts import publish
from tests.benchmarks.report import NOTHING, Benchmark, Figures, Row, percentile
from tests.benchmarks.rig import Rig
from tests.kit.state import message
from tests.kit.wait import wait_until

#: A worker needs about a second for a thousand tasks.
ON_TIME_SECONDS = 2
PATIENCE_SECONDS = 10

DEAD = "box:1:dead"


def measure(rig: Rig) -> Figures:
    count = rig.scaled(1_000, 500)
    ahead_seconds, before_seconds = rig.scaled((15, 5), (9, 4))
    first = rig.start_worker()
    first.await_ready()
    due = time.time() + ahead_seconds
    publish(rig, count, due)
    time.sleep(max(due - before_seconds - time.time(), 0))
    first.kill()
    rig.start_worker().await_ready()
    end = due + PATIENCE_SECONDS
    seconds = end - time.time() + 1
    wait_until(lambda: rig.done() >= count or time.time() >= end, "the end", seconds)
    late = [start.at - due for start in rig.starts()]
    return {
        "ahead_s": ahead_seconds,
        "before_s": before_seconds,
        "count": count,
        "on_time": sum(each <= ON_TIME_SECONDS for each in late),
        "run": len({start.number for start in rig.starts()}),
        "max_s": percentile(late, 1) if late else 0,
    }


def rows(stock: Figures, ours: Figures) -> list[Row]:
    count = ours["count"]
    return [
        Row(
            f"{count:,.0f} tasks due in {ours['ahead_s']:.0f} s, their worker killed "
            f"{ours['before_s']:.0f} s before, another started: run within {ON_TIME_SECONDS} s "
            f"(within {PATIENCE_SECONDS} s)",
            f"all {count:,.0f}",
            f"{stock['on_time']:,.0f} ({stock['run']:,.0f})",
            f"{ours['on_time']:,.0f} ({ours['run']:,.0f})",
            reached=ours["on_time"] == ours["run"] == count,
        )
    ]


def reclaiming(port: int) -> tuple[int, float]:
    """How many messages of a dead consumer went back to their list, and in how many seconds."""
    with redis.Redis(port=port) as client:
        began = time.perf_counter()
        return Store(client).leases.reclaim(QUEUE, DEAD), time.perf_counter() - began


def measure_reclaim(rig: Rig) -> Figures:
    count = rig.scaled(100_000, 10_000)
    keys = Store(rig.redis).keys(QUEUE)
    record = "0" + message("x" * 600)
    for tag in range(0, count, 1000):
        held = {f"{n + 1}": record for n in range(tag, tag + 1000)}
        rig.redis.hset(keys.unacked(DEAD), mapping=held)
    rig.redis.zadd(keys.consumers, {DEAD: 1})
    (back, seconds), p99 = probed(rig, reclaiming, rig.server.port)
    if back != count or rig.redis.llen(QUEUE) != count:
        raise RuntimeError(f"{back} of {count} messages are back")
    return {"count": count, "seconds": seconds, "p99_ms": p99}


def reclaim_rows(ours: Figures) -> list[Row]:
    return [
        Row(
            f"{ours['count']:,.0f} unacked messages of a dead consumer back in their queue, and "
            "the p99 of another client's PING meanwhile",
            "≤ 10 ms",
            NOTHING,
            f"{ours['seconds']:.1f} s, {ours['p99_ms']:.1f} ms",
            reached=ours["p99_ms"] <= 10,
        )
    ]


BENCHMARKS = [
    Benchmark("recovery", measure, rows),
    Benchmark("reclaim", measure_reclaim, reclaim_rows, sides=("ours",)),
]
