"""Spark into a backlog and out of it, beside two plain processes that do the same.

It uses hiredis, which the extra `spark` installs: the parser of redis-py alone takes half the time
of a read.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from importlib.util import find_spec
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

from redis import Redis

from tests.benchmarks.bulk import delayed_of
from tests.benchmarks.report import Figures, Line, benchmark, medians, percentile
from tests.benchmarks.rig import Rig, cpu_seconds
from tests.benchmarks.workers import send_steadily
from tests.kit.told import told

CLIENTS = 2
START = datetime(2100, 1, 1, tzinfo=timezone.utc)
TEXT = "x" * 300
WARM_UP = 2_000
PAYLOADS = ("id", "task", "queue", "due", "payload")
NO_MESSAGES = ("id", "queue", "due")

PARTS = 4
TEN_MILLION = 10_000_000
EVENTS_WARM_UP, EVENTS_BATCH = 20_000, 1_000


def check_parser() -> None:
    if find_spec("hiredis") is None:
        raise RuntimeError("hiredis is not installed: pip install 'kombu-delayed[spark]'")


def client_of(url: str) -> Redis:
    return Redis.from_url(url.removeprefix("delayed+"))


def plain_write(url: str, first: int, count: int) -> tuple[float, float]:
    """Schedule rows as one process; returns when it began and ended."""
    with delayed_of(url) as delayed:
        for numbers in (range(-WARM_UP - first, -first), range(first, first + count)):
            rows = (
                ("work", (n, TEXT), {}, START + timedelta(seconds=n), {"task_id": f"{n}"})
                for n in numbers
            )
            began = perf_counter()
            delayed.schedule_many(rows, progress=None)
        return began, perf_counter()


def plain_rate(url: str, count: int) -> float:
    """Rows per second of several processes at the same time."""
    each, spawn = count // CLIENTS, multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(CLIENTS, mp_context=spawn) as pool:
        futures = [pool.submit(plain_write, url, n * each, each) for n in range(CLIENTS)]
        times = [future.result() for future in futures]
    return count / (max(ended for _, ended in times) - min(began for began, _ in times))


@contextmanager
def spark_session(**more: str) -> Iterator[Any]:
    """A session, with `more` settings."""
    from celery_ext.spark import session

    spark = session(
        **{
            "spark.master": f"local[{CLIENTS}]",
            "spark.driver.memory": "2g",
            "spark.driver.host": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.log.level": "OFF",
            **more,
        }
    )
    yield spark
    spark.stop()


def reminders(spark: Any, first: int, last: int) -> Any:
    from pyspark.sql import functions as F

    after = F.make_dt_interval(secs=F.col("id").cast("decimal(18,6)"))
    return spark.range(first, last, numPartitions=2 * CLIENTS).select(
        F.col("id").cast("string"),
        F.lit("work").alias("task"),
        F.struct(F.col("id"), F.lit(TEXT)).alias("args"),
        (F.lit(START) + after).alias("eta"),
    )


def write_rate(spark: Any, url: str, first: int, last: int, budget_ms: int = 0) -> float:
    """Rows per second. Without a budget there are no pauses for others."""
    from celery_ext.spark import schedule

    began = perf_counter()
    rows = reminders(spark, first, last)
    report = schedule(rows, broker=url, job_id="benchmark", latency_budget_ms=budget_ms)
    seconds = perf_counter() - began
    if report.accepted + report.already != last - first:
        raise RuntimeError(f"of {last - first} rows Spark has scheduled {report}")
    return (last - first) / seconds


def read_rate(spark: Any, url: str, columns: tuple[str, ...], count: int) -> float:
    """Rows per second."""
    from celery_ext.spark import backlog

    began = perf_counter()
    frame = backlog(spark, columns=columns, broker=url)
    frame.write.format("noop").mode("overwrite").save()
    return count / (perf_counter() - began)


def spark_rates(url: str, count: int) -> Figures:
    """Rows per second of a warm Spark with as many cores; and of the same job again."""
    with spark_session() as spark, client_of(url) as client:
        write_rate(spark, url, count, 2 * count)
        before = cpu_seconds(client)
        figures = {"spark": write_rate(spark, url, 0, count)}
        figures["server_us"] = (cpu_seconds(client) - before) / count * 1e6
        figures["again"] = write_rate(spark, url, 0, count)
        for name, columns in (("payloads", PAYLOADS), ("index", NO_MESSAGES)):
            read_rate(spark, url, columns, 2 * count)
            figures[name] = read_rate(spark, url, columns, 2 * count)
        return figures


def _rate(what: str, name: str, least: int) -> Line:
    reached = lambda f: f[name] >= least  # noqa: E731
    return Line(what, f"{{{name}:,.0f}}/s", f"≥ {least:,}/s", reached=reached)


@benchmark(
    "spark",
    Line(
        "Spark's `schedule` of {count:,.0f} rows with a ledger on `local[2]`, without a latency "
        "budget, and `schedule_many` in two processes without a ledger",
        "{spark:,.0f}/s, {plain:,.0f}/s",
        "≥ 60,000/s, ratio ≥ 0.9",
        ("spark", "plain"),
        lambda f: f["spark"] >= 60_000 and f["spark"] / f["plain"] >= 0.9,
    ),
    Line("the server's processor time for each of these rows", "{server_us:.1f} µs"),
    Line("the same job again, which schedules nothing", "{again:,.0f}/s"),
    _rate("Spark's `backlog` of {read:,.0f} with payloads", "payloads", 90_000),
    _rate("`backlog` without any message", "index", 250_000),
    rounds=1,
)
def spark(rig: Rig) -> Figures:
    """The sides take turns, so that other load on the machine hits both."""
    check_parser()
    count, found = rig.scaled(400_000, 10_000), []
    for _ in range(rig.scaled(3, 1)):
        plain = plain_rate(rig.url(), count)
        rig.redis.flushall()
        found.append({"plain": plain, **rig.apart(spark_rates, rig.url(), count, seconds=600)})
        rig.redis.flushall()
    return {"count": count, "read": 2 * count, **medians(found)}


# A million rows through Spark and back, and an estimate for ten million.


def fingerprint(frame: Any, due: str) -> tuple[Any, ...]:
    """The number of rows, and a sum over the hashes of their ids and due times."""
    from pyspark.sql import functions as F

    hashed = F.xxhash64("id", F.unix_millis(due)).cast("decimal(38,0)")
    return tuple(frame.agg(F.count("*"), F.sum(hashed)).first())


def round_trip(url: str, count: int) -> Figures:
    """Write rows in parts one after the other, and read them together."""
    from celery_ext.spark import backlog

    with spark_session() as spark, client_of(url) as client:
        used_bytes = lambda: client.info("memory")["used_memory"]  # type: ignore[index]  # noqa: E731
        warm_up = count // 10
        write_rate(spark, url, count, count + warm_up)
        before = used_bytes()
        edges = [count * part // PARTS for part in range(PARTS + 1)]
        rates = [write_rate(spark, url, *pair) for pair in pairwise(edges)]
        figures = {
            "write": PARTS / sum(1 / rate for rate in rates),
            "write_first": rates[0],
            "write_last": rates[-1],
            "bytes": (used_bytes() - before) / count,
            "read": read_rate(spark, url, PAYLOADS, count + warm_up),
            "index": read_rate(spark, url, NO_MESSAGES, count + warm_up),
        }
        written = fingerprint(reminders(spark, 0, count + warm_up), "eta")
        found = fingerprint(backlog(spark, columns=["id", "due"], broker=url), "due")
        if written != found:
            raise RuntimeError(f"written {written}, read {found}")
    return figures


@benchmark(
    "spark-million",
    Line(
        "Spark's `schedule` of {count:,.0f} rows with a ledger, without a latency budget, and "
        "`backlog` of them with payloads, on `local[2]`: both, each",
        lambda f: (
            f"{f['count'] / f['write'] + f['count'] / f['read']:,.0f} s, {f['write']:,.0f}/s, "
            f"{f['read']:,.0f}/s"
        ),
    ),
    Line("`backlog` of them without any message", "{index:,.0f}/s"),
    Line(
        f"its last {1 / PARTS:.0%} beside its first when writing",
        "{write_last:,.0f}/s, {write_first:,.0f}/s",
        ratio=("write_last", "write_first"),
    ),
    Line("the server's memory for each row, its ledger and events included", "{bytes:,.0f} B"),
    Line(
        f"*extrapolated* to {TEN_MILLION:,.0f} rows: writing at the rate of the last "
        f"{1 / PARTS:.0%}, reading at the rate above, memory in proportion",
        lambda f: (
            f"{TEN_MILLION / f['write_last']:,.0f} s, {TEN_MILLION / f['read']:,.0f} s, "
            f"{TEN_MILLION * f['bytes'] / 2**30:.1f} GiB"
        ),
    ),
    rounds=1,
)
def spark_million(rig: Rig) -> Figures:
    check_parser()
    count = rig.scaled(1_000_000, 20_000)
    return {"count": float(count), **rig.apart(round_trip, rig.url(), count, seconds=900)}


# Lifecycle events from the broker into Parquet.


def write_events(url: str, count: int) -> None:
    """Events as written by a worker's acks, in two queues."""
    with client_of(url) as client:
        for first in range(0, count, EVENTS_BATCH):
            pipeline = client.pipeline(transaction=False)
            for number in range(first, min(first + EVENTS_BATCH, count)):
                fields = told(f"{number:036}", task="shop.remind", due_ms=number)
                pipeline.xadd(f"{{{('mail', 'far')[number % 2]}}}:events", fields)
            pipeline.execute()


def archive_rate(spark: Any, url: str, path: str, count: int) -> float:
    """Events per second that are new and get into an archive."""
    from celery_ext.spark.events.archive import log_events, watch

    write_events(url, count)
    began = perf_counter()
    found = watch(log_events(spark, url, path=path), lambda more: None)
    seconds = perf_counter() - began
    if found != count:
        raise RuntimeError(f"of {count} new events {found} are archived")
    return count / seconds


def archive_rates(url: str, path: str, count: int, rounds: int) -> list[float]:
    with spark_session() as spark:
        archive_rate(spark, url, path, EVENTS_WARM_UP)
        return [archive_rate(spark, url, path, count) for _ in range(rounds)]


@benchmark(
    "spark-archive",
    _rate(
        "Spark's `archive` of {count:,.0f} new lifecycle events to Parquet on `local[2]`",
        "archive",
        55_000,
    ),
    rounds=1,
)
def spark_archive(rig: Rig) -> Figures:
    check_parser()
    count, path = rig.scaled(400_000, 10_000), str(rig.directory / "archive")
    rates = rig.apart(archive_rates, rig.url(), path, count, rig.scaled(3, 1), seconds=300)
    return {"count": count, "archive": statistics.median(rates)}


# Writing beside tasks that run.


PHASE_SECONDS, LIVE_RATE = 12.0, 100
#: Each phase and its write options; None if nothing is written. Others burn CPU in `burnt`.
PHASES: dict[str, dict[str, Any] | None] = {
    "idle": None,
    "burnt": None,
    "full": {"latency_budget_ms": 0},
    "safe": {},
    "capped": {"max_rows_per_second": 5_000},
}


class Phase(NamedTuple):
    began: float
    ended: float
    rows: int


def phases(url: str, seconds: float) -> dict[str, Phase]:
    """Run the phases one after the other; returns when each ran, and how many rows it wrote."""
    from celery_ext.spark import schedule

    found, first = {}, 0
    with spark_session() as spark:
        write_rate(spark, url, -20_000, 0)
        for name, options in PHASES.items():
            burning = [multiprocessing.Process(target=_burn, daemon=True) for _ in range(CLIENTS)]
            for process in burning if name == "burnt" else ():
                process.start()
            began, before = time.time(), first
            if options is None:
                time.sleep(seconds)
            else:  # one job, as each needs planning
                per_second = options.get("max_rows_per_second", 20_000)
                last = first + int(per_second * seconds)
                schedule(reminders(spark, first, last), broker=url, queue="bulk", **options)
                first = last
            found[name] = Phase(began, time.time(), first - before)
            for process in burning if name == "burnt" else ():
                process.kill()
            time.sleep(2)
    return found


def _burn() -> None:
    while True:
        pass


@benchmark(
    "spark-live",
    Line(
        f"lateness of {LIVE_RATE} tasks/s, p99: alone, with the processors busy elsewhere, beside "
        "Spark's `schedule` without a budget, with the default one, at 5,000 rows/s",
        "{idle:,.0f}, {burnt:,.0f}, {full:,.0f}, {safe:,.0f}, {capped:,.0f} ms",
    ),
    Line(
        "rows written meanwhile: without a budget, with the default one, at 5,000 rows/s",
        "{full_rate:,.0f}/s, {safe_rate:,.0f}/s, {capped_rate:,.0f}/s",
    ),
    rounds=1,
)
def spark_live(rig: Rig) -> Figures:
    """All phases in one run; the tasks of a phase are those due in it."""
    rig.start_worker().await_ready()
    given = rig.url(), 1_000 * LIVE_RATE, LIVE_RATE, _soon
    sender = multiprocessing.get_context("spawn").Process(target=send_steadily, args=given)
    sender.start()
    try:
        found = rig.apart(phases, rig.url(), rig.scaled(PHASE_SECONDS, 3.0), seconds=400)
    finally:
        sender.kill()
    starts, figures = rig.starts(), {}
    for name, phase in found.items():
        late = [s.at - s.due for s in starts if phase.began + 1 < s.due < phase.ended]
        figures[name] = percentile(late, 0.99) * 1000
        figures[f"{name}_rate"] = phase.rows / (phase.ended - phase.began)
    return figures


def _soon(chance: random.Random, number: int) -> dict[str, Any]:
    return {"countdown": 1.0}
