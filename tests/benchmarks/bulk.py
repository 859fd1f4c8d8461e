"""Many at once: scheduling in bulk, and maintaining a backlog of a million."""

from __future__ import annotations

import gc
import os
import random
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import redis

from celery_ext import Delayed
from celery_ext.control.backup.transfer import restore
from kombu_delayed.store.store import Store
from tests.benchmarks.app import QUEUE, create_app
from tests.benchmarks.report import NOTHING, Figures, Line, benchmark, percentile
from tests.benchmarks.rig import Rig
from tests.benchmarks.workers import singly
from tests.kit.state import message

TEXT = "x" * 300
CALLS = 2_000
#: The task name of a tenth of the backlog.
RARE = "mail.send"
MONTH_SECONDS = 30 * 86_400
PROBE_SECONDS = 0.001
DEAD = "box:1:dead"


@contextmanager
def delayed_of(url: str) -> Iterator[Delayed]:
    with create_app(url) as app:
        delayed = Delayed(app)
        yield delayed
        delayed.close()


def in_bulk(url: str, count: int) -> float:
    """Tasks per second in one call of `schedule_many`."""
    with delayed_of(url) as delayed:
        work = delayed.app.tasks["work"]
        rows = ((work, (TEXT,), {}, None, {"countdown": 3600}) for _ in range(count))
        began = perf_counter()
        report = delayed.schedule_many(rows, progress=None)
        seconds = perf_counter() - began
        if report.delayed != count:
            raise RuntimeError(f"{report.delayed} of {count} tasks are delayed")
        return count / seconds


@benchmark(
    "schedule-many",
    Line(
        "`schedule_many` of 100,000 tasks with 300-byte arguments, and `apply_async` in a loop",
        "{bulk:,.0f}/s, {loop:,.0f}/s",
        "ratio ≥ 12",
        lambda f: f"{f['bulk'] / f['loop']:.1f}",
        lambda f: f["bulk"] / f["loop"] >= 12,
    ),
    rounds=1,
)
def schedule_many(rig: Rig) -> Figures:
    """The ways take turns, so that other load on the machine hits both."""
    loops, bulks = [], []
    for _ in range(rig.scaled(3, 1)):
        loops.append(rig.apart(singly, rig.url(), rig.scaled(8_000, 1_000), TEXT))
        bulks.append(rig.apart(in_bulk, rig.url(), rig.scaled(100_000, 10_000)))
        rig.redis.flushall()
    return {"loop": statistics.median(loops), "bulk": statistics.median(bulks)}


# A backlog of a million.


def filling(url: str, count: int) -> int:
    """Tasks with different arguments, due in the coming month except its first hour."""
    chance = random.Random(1)
    start = datetime.now(timezone.utc) + timedelta(hours=1)

    def rows() -> Iterator[Any]:
        for n in range(count):
            eta = start + timedelta(seconds=chance.random() * MONTH_SECONDS)
            yield "work" if n % 10 else RARE, (n, chance.randbytes(50).hex()), {}, eta

    with delayed_of(url) as delayed:
        return delayed.schedule_many(rows(), progress=None).delayed


def measured(url: str, work: Callable[..., int], *arguments: Any) -> tuple[int, float, float]:
    """The result of a call, its seconds, and the megabytes by which the process has grown."""
    with delayed_of(url) as delayed:
        delayed.queues()
        gc.collect()
        before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        began = perf_counter()
        found = work(delayed, *arguments)
        seconds = perf_counter() - began
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return found, seconds, max(most - before, 0) / 2**20


def finding(delayed: Delayed, **criteria: Any) -> int:
    return sum(1 for _ in delayed.find(**criteria))


def backing_up(delayed: Delayed, path: Path) -> int:
    return delayed.backup(path).messages


def restoring(delayed: Delayed, path: Path) -> int:
    return restore(delayed, path).messages


def probed(rig: Rig, function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """The result of a call in its own process, and the p99 of PING meanwhile in ms."""
    waits = []
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(lambda: rig.apart(function, *arguments, seconds=600))
        while not future.done():
            began = perf_counter()
            rig.redis.ping()
            waits.append((perf_counter() - began) * 1000)
            time.sleep(PROBE_SECONDS)
        return future.result(), percentile(waits, 0.99)


def measure_cancel(rig: Rig) -> Figures:
    """Single calls in turn with a trivial script.

    The script is sent over the same connection, with nothing of redis-py in between but its parser,
    and by redis-py as programs send theirs.
    """
    with delayed_of(rig.url()) as delayed:
        ids = [each.id for each, _ in zip(delayed.find(), range(CALLS), strict=False)]
        run, key = delayed.store.run, delayed.store.keys(QUEUE).wake
        sha = rig.redis.script_load("return redis.call('EXISTS', KEYS[1])")
        backlog = delayed.backlog(QUEUE)
        calls: dict[str, Callable[[str], Any]] = {
            "trip_us": lambda id: run("EVALSHA", sha, 1, key),
            "redis_py_trip_us": lambda id: rig.redis.evalsha(sha, 1, key),
            "backlog_cancel_us": lambda id: backlog.cancel([id]),
            "cancel_us": lambda id: delayed.cancel(id, QUEUE),
        }
        waits: dict[str, list[float]] = {name: [] for name in calls}
        for n, id in enumerate(ids):
            cancel = ("cancel_us", "backlog_cancel_us")[n % 2]
            for name in ("trip_us", "redis_py_trip_us", cancel):
                began = perf_counter()
                calls[name](id)
                waits[name].append((perf_counter() - began) * 1e6)
        return {name: statistics.median(each) for name, each in waits.items()}


def measure_forecast(rig: Rig) -> float:
    times = []
    with delayed_of(rig.url()) as delayed:
        delayed.queues()
        for _ in range(5):
            began = perf_counter()
            delayed.forecast(hours=24 * 30, buckets=48)
            times.append((perf_counter() - began) * 1000)
    return statistics.median(times)


def _reading(name: str, what: str, least: int | None = None) -> Line:
    def reached(f: Figures) -> bool:
        rate, grown, p99 = (f[f"{name}_{figure}"] for figure in ("rate", "mb", "p99_ms"))
        return rate >= (least or 0) and grown <= 50 and p99 <= 10

    return Line(
        f"{what}: rate, growth of the process, p99 of another client's PING",
        f"{{{name}_rate:,.0f}}/s, {{{name}_mb:.0f}} MB, {{{name}_p99_ms:.1f}} ms",
        f"≥ {least:,}/s, ≤ 50 MB, ≤ 10 ms" if least else NOTHING,
        reached=reached if least else None,
    )


@benchmark(
    "million",
    Line(  # the target is a small multiple of the round trip of an ordinary client
        "`Delayed.cancel` at a backlog of {count:,.0f}, in an app that keeps no results, and a "
        "round trip of redis-py with one small script",
        "{cancel_us:.0f} µs, {redis_py_trip_us:.0f} µs",
        "ratio ≤ 1.5",
        ("cancel_us", "redis_py_trip_us"),
        lambda f: f["cancel_us"] / f["redis_py_trip_us"] <= 1.5,
    ),
    Line(
        "`Delayed.cancel`, `Backlog.cancel`, and the same trip by their connection, without "
        "redis-py's client",
        "{cancel_us:.0f} µs, {backlog_cancel_us:.0f} µs, {trip_us:.0f} µs",
        ratio=lambda f: (
            f"{f['cancel_us'] / f['trip_us']:.2f}, {f['backlog_cancel_us'] / f['trip_us']:.2f}"
        ),
    ),
    _reading("find", "`find` by task name, a tenth of {count:,.0f}", 100_000),
    _reading("where", "`find` by an argument, a tenth of {count:,.0f}"),
    _reading("read", "`find` of all {count:,.0f}"),
    Line(
        "`forecast` of {count:,.0f} in 48 parts",
        "{forecast_ms:.0f} ms",
        "≤ 100 ms",
        reached=lambda f: f["forecast_ms"] <= 100,
    ),
    _reading("backup", "`backup` of {count:,.0f}, {file_bytes:.0f} B each", 50_000),
    _reading("restore", "`restore` of {count:,.0f}", 50_000),
    rounds=1,
)
def million(rig: Rig) -> Figures:
    count, path = rig.scaled(1_000_000, 30_000), rig.directory / "backlog.backup"
    rig.apart(filling, rig.url(), count, seconds=600)
    figures = {"count": float(count), **measure_cancel(rig)}
    figures["forecast_ms"] = measure_forecast(rig)

    def measure(name: str, work: Callable[..., int], *arguments: Any, of: int = 0) -> int:
        (found, seconds, mb), p99 = probed(rig, measured, rig.url(), work, *arguments)
        rate = (of or found) / seconds
        figures.update({f"{name}_rate": rate, f"{name}_mb": mb, f"{name}_p99_ms": p99})
        return int(found)

    measure("find", partial(finding, task="mail.*"), of=count)
    measure("where", partial(finding, where="args.0 ~ *7"), of=count)
    measure("read", finding, of=count)
    saved = measure("backup", backing_up, path)
    figures["file_bytes"] = path.stat().st_size / saved
    rig.redis.flushall()
    restored = measure("restore", restoring, path)
    if restored != saved:
        raise RuntimeError(f"{restored} of {saved} messages are restored")
    return figures


def reclaiming(port: int) -> tuple[int, float]:
    """How many messages of a dead consumer returned to their list, and in how many seconds."""
    with redis.Redis(port=port) as client:
        began = perf_counter()
        return Store(client).leases.reclaim(QUEUE, DEAD), perf_counter() - began


@benchmark(
    "reclaim",
    Line(
        "{count:,.0f} unacked messages of a dead consumer back in their queue, and the p99 of "
        "another client's PING meanwhile",
        "{seconds:.1f} s, {p99_ms:.1f} ms",
        "≤ 10 ms",
        reached=lambda f: f["p99_ms"] <= 10,
    ),
)
def reclaim(rig: Rig) -> Figures:
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
