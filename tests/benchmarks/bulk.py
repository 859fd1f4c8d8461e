"""Many at once: scheduling in bulk, and what looks after a backlog of a million."""

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
from pathlib import Path
from time import perf_counter
from typing import Any

from celery_ext import Delayed
from celery_ext.control.backup.transfer import restore
from tests.benchmarks.app import QUEUE, create_app
from tests.benchmarks.report import NOTHING, Benchmark, Figures, Row, percentile
from tests.benchmarks.rig import Rig

ARGUMENTS = ("x" * 300,)
COUNTDOWN_SECONDS = 3600
WARM_UP = 200
CALLS = 2_000
#: A tenth of the backlog has this name.
RARE = "mail.send"
MEGABYTE = 2**20
MONTH_SECONDS = 30 * 86_400
PROBE_SECONDS = 0.001


@contextmanager
def delayed_of(url: str) -> Iterator[Delayed]:
    app = create_app(url)
    delayed = Delayed(app)
    yield delayed
    delayed.close()
    app.close()


# Scheduling in bulk.


def one_by_one(url: str, count: int) -> float:
    """Tasks per second, one call of `apply_async` each."""
    work = create_app(url).tasks["work"]
    for _ in range(WARM_UP):
        work.apply_async(ARGUMENTS, countdown=COUNTDOWN_SECONDS)
    began = perf_counter()
    for _ in range(count):
        work.apply_async(ARGUMENTS, countdown=COUNTDOWN_SECONDS)
    return count / (perf_counter() - began)


def in_bulk(url: str, count: int) -> float:
    """Tasks per second in one call of `schedule_many`."""
    with delayed_of(url) as delayed:
        work = delayed.app.tasks["work"]
        options = {"countdown": COUNTDOWN_SECONDS}
        rows = ((work, ARGUMENTS, {}, None, options) for _ in range(count))
        began = perf_counter()
        report = delayed.schedule_many(rows, progress=None)
        seconds = perf_counter() - began
        if report.delayed != count:
            raise RuntimeError(f"{report.delayed} of {count} tasks are delayed")
        return count / seconds


def measure_schedule(rig: Rig) -> Figures:
    """In turn, so that whatever else the machine does falls on both."""
    loops, bulks = [], []
    for _ in range(rig.scaled(3, 1)):
        loops.append(rig.apart(one_by_one, rig.url(), rig.scaled(8_000, 1_000)))
        bulks.append(rig.apart(in_bulk, rig.url(), rig.scaled(100_000, 10_000)))
        rig.redis.flushall()
    return {"loop": statistics.median(loops), "bulk": statistics.median(bulks)}


def schedule_rows(ours: Figures) -> list[Row]:
    ratio = ours["bulk"] / ours["loop"]
    return [
        Row(
            "`schedule_many` of 100,000 tasks with 300-byte arguments, and `apply_async` in a loop",
            "ratio ≥ 12",
            NOTHING,
            f"{ours['bulk']:,.0f}/s, {ours['loop']:,.0f}/s",
            f"{ratio:.1f}",
            ratio >= 12,
        )
    ]


# A backlog of a million.


def filling(url: str, count: int) -> int:
    """Tasks with arguments of their own, due in the coming month but its first hour."""
    chance = random.Random(1)
    start = datetime.now(timezone.utc) + timedelta(hours=1)

    def rows() -> Iterator[Any]:
        for n in range(count):
            eta = start + timedelta(seconds=chance.random() * MONTH_SECONDS)
            yield "work" if n % 10 else RARE, (n, chance.randbytes(50).hex()), {}, eta

    with delayed_of(url) as delayed:
        return delayed.schedule_many(rows(), progress=None).delayed


def measured(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """What a call returns, its seconds, and the megabytes by which the process has grown."""
    gc.collect()
    before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    began = perf_counter()
    found = work()
    seconds = perf_counter() - began
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found, seconds, max(most - before, 0) / MEGABYTE


def finding(url: str, pattern: str | None) -> tuple[int, float, float]:
    with delayed_of(url) as delayed:
        delayed.queues()
        criteria = {"task": pattern} if pattern else {}
        return measured(lambda: sum(1 for _ in delayed.find(**criteria)))


def backing_up(url: str, path: Path) -> tuple[int, float, float]:
    with delayed_of(url) as delayed:
        delayed.queues()
        return measured(lambda: delayed.backup(path).messages)


def restoring(url: str, path: Path) -> tuple[int, float, float]:
    with delayed_of(url) as delayed:
        delayed.queues()
        return measured(lambda: restore(delayed, path).messages)


def probed(rig: Rig, function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """What a call in a process of its own returns, and the p99 of PING meanwhile in ms."""
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
    """Single calls in turn with a script that does next to nothing.

    That is sent over the same connection, with nothing of redis-py in between but its parser, and
    by redis-py as programs send theirs.
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
    with delayed_of(rig.url()) as delayed:
        delayed.queues()
        times = []
        for _ in range(5):
            began = perf_counter()
            delayed.forecast(hours=24 * 30, buckets=48)
            times.append((perf_counter() - began) * 1000)
        return statistics.median(times)


def measure(rig: Rig) -> Figures:
    count = rig.scaled(1_000_000, 30_000)
    rig.apart(filling, rig.url(), count, seconds=600)
    figures = {"count": float(count), **measure_cancel(rig)}
    figures["forecast_ms"] = measure_forecast(rig)
    for name, pattern in (("find", "mail.*"), ("read", None)):
        (_, seconds, grown), p99 = probed(rig, finding, rig.url(), pattern)
        figures |= {f"{name}_rate": count / seconds, f"{name}_mb": grown, f"{name}_p99_ms": p99}
    path = rig.directory / "backlog.backup"
    (saved, seconds, grown), p99 = probed(rig, backing_up, rig.url(), path)
    figures |= {"backup_rate": saved / seconds, "backup_mb": grown, "backup_p99_ms": p99}
    figures["file_bytes"] = path.stat().st_size / saved
    rig.redis.flushall()
    (restored, seconds, grown), p99 = probed(rig, restoring, rig.url(), path)
    if restored != saved:
        raise RuntimeError(f"{restored} of {saved} messages are restored")
    figures |= {"restore_rate": restored / seconds, "restore_mb": grown, "restore_p99_ms": p99}
    return figures


def rows(ours: Figures) -> list[Row]:
    count = f"{ours['count']:,.0f}"
    return [
        *_cancelling(ours, count),
        _reading(ours, "find", f"`find` by task name, a tenth of {count}", 100_000),
        _reading(ours, "read", f"`find` of all {count}", None),
        Row(
            f"`forecast` of {count} in 48 parts",
            "≤ 100 ms",
            NOTHING,
            f"{ours['forecast_ms']:.0f} ms",
            reached=ours["forecast_ms"] <= 100,
        ),
        _reading(ours, "backup", f"`backup` of {count}, {ours['file_bytes']:.0f} B each", 50_000),
        _reading(ours, "restore", f"`restore` of {count}", 50_000),
    ]


def _cancelling(ours: Figures, count: str) -> list[Row]:
    """To be reached is a small multiple of the trip that everybody's client makes."""
    trip, bare = ours["redis_py_trip_us"], ours["trip_us"]
    cancel, inner = ours["cancel_us"], ours["backlog_cancel_us"]
    return [
        Row(
            f"`Delayed.cancel` at a backlog of {count}, in an app that keeps no results, and a "
            "round trip of redis-py with one small script",
            "ratio ≤ 1.5",
            NOTHING,
            f"{cancel:.0f} µs, {trip:.0f} µs",
            f"{cancel / trip:.2f}",
            cancel / trip <= 1.5,
        ),
        Row(
            "`Delayed.cancel`, `Backlog.cancel`, and the same trip by their connection, without "
            "redis-py's client",
            NOTHING,
            NOTHING,
            f"{cancel:.0f} µs, {inner:.0f} µs, {bare:.0f} µs",
            f"{cancel / bare:.2f}, {inner / bare:.2f}",
        ),
    ]


def _reading(ours: Figures, name: str, what: str, least: int | None) -> Row:
    rate, grown, p99 = ours[f"{name}_rate"], ours[f"{name}_mb"], ours[f"{name}_p99_ms"]
    return Row(
        f"{what}: rate, growth of the process, p99 of another client's PING",
        f"≥ {least:,}/s, ≤ 50 MB, ≤ 10 ms" if least else NOTHING,
        NOTHING,
        f"{rate:,.0f}/s, {grown:.0f} MB, {p99:.1f} ms",
        reached=rate >= least and grown <= 50 and p99 <= 10 if least else None,
    )


BENCHMARKS = [
    Benchmark("schedule-many", measure_schedule, schedule_rows, sides=("ours",), rounds=1),
    Benchmark("million", measure, rows, sides=("ours",), rounds=1),
]
