"""Spark into a backlog and out of it, beside two plain processes that do the same.

With hiredis, which the extra `spark` brings: the parser of redis-py alone takes half the time of a
read.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from importlib.util import find_spec
from time import perf_counter
from typing import Any

from redis import Redis

from celery_ext import Delayed
from tests.benchmarks.app import create_app
from tests.benchmarks.report import NOTHING, Benchmark, Figures, Row
from tests.benchmarks.rig import Rig

CLIENTS = 2
START = datetime(2100, 1, 1, tzinfo=timezone.utc)
TEXT = "x" * 300
WARM_UP = 2_000
PAYLOADS = ("id", "task", "queue", "due", "payload")
NO_MESSAGES = ("id", "queue", "due")


def check_parser() -> None:
    if find_spec("hiredis") is None:
        raise RuntimeError("hiredis is not installed: pip install 'kombu-delayed[spark]'")


def plain_write(url: str, first: int, count: int) -> tuple[float, float]:
    """Schedule rows as one process; returns when it began and ended."""
    app = create_app(url)
    delayed = Delayed(app)
    for numbers in (range(-WARM_UP - first, -first), range(first, first + count)):
        rows = (
            ("work", (n, TEXT), {}, START + timedelta(seconds=n), {"task_id": f"{n}"})
            for n in numbers
        )
        began = perf_counter()
        delayed.schedule_many(rows, progress=None)
    ended = perf_counter()
    delayed.close()
    app.close()
    return began, ended


def plain_rate(url: str, count: int) -> float:
    """Rows per second of several processes at the same time."""
    each, spawn = count // CLIENTS, multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(CLIENTS, mp_context=spawn) as pool:
        futures = [pool.submit(plain_write, url, n * each, each) for n in range(CLIENTS)]
        times = [future.result() for future in futures]
    return count / (max(ended for _, ended in times) - min(began for began, _ in times))


@contextmanager
def spark_session() -> Iterator[Any]:
    from celery_ext.spark import session

    spark = session(
        **{
            "spark.master": f"local[{CLIENTS}]",
            "spark.driver.memory": "2g",
            "spark.driver.host": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.log.level": "OFF",
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


def write_rate(spark: Any, url: str, first: int, last: int) -> float:
    """Rows per second."""
    from celery_ext.spark import schedule

    began = perf_counter()
    report = schedule(reminders(spark, first, last), broker=url, job_id="benchmark")
    seconds = perf_counter() - began
    if report.accepted + report.already != last - first:
        raise RuntimeError(f"of {last - first} rows Spark has scheduled {report}")
    return (last - first) / seconds


def server_seconds(url: str) -> float:
    """The processor time that the server has taken."""
    with Redis.from_url(url.removeprefix("delayed+")) as client:
        used: Any = client.info("cpu")
    return float(used["used_cpu_user"] + used["used_cpu_sys"])


def read_rate(spark: Any, url: str, columns: tuple[str, ...], count: int) -> float:
    """Rows per second."""
    from celery_ext.spark import backlog

    began = perf_counter()
    frame = backlog(spark, columns=columns, broker=url)
    frame.write.format("noop").mode("overwrite").save()
    return count / (perf_counter() - began)


def spark_rates(url: str, count: int) -> Figures:
    """Rows per second of Spark on as many cores, when it is warm; and of the same job again."""
    with spark_session() as spark:
        write_rate(spark, url, count, 2 * count)
        before = server_seconds(url)
        figures = {"spark": write_rate(spark, url, 0, count)}
        figures["server_us"] = (server_seconds(url) - before) / count * 1e6
        figures["again"] = write_rate(spark, url, 0, count)
        for name, columns in (("payloads", PAYLOADS), ("index", NO_MESSAGES)):
            read_rate(spark, url, columns, 2 * count)
            figures[name] = read_rate(spark, url, columns, 2 * count)
        return figures


def measure(rig: Rig) -> Figures:
    """In turn, so that whatever else the machine does falls on both."""
    check_parser()
    count, found = rig.scaled(400_000, 10_000), []
    for _ in range(rig.scaled(3, 1)):
        plain = plain_rate(rig.url(), count)
        rig.redis.flushall()
        found.append({"plain": plain, **rig.apart(spark_rates, rig.url(), count, seconds=600)})
        rig.redis.flushall()
    medians = {name: statistics.median(each[name] for each in found) for name in found[0]}
    return {"count": float(count), **medians}


def rows(ours: Figures) -> list[Row]:
    count, ratio = f"{ours['count']:,.0f}", ours["spark"] / ours["plain"]
    read = f"{2 * ours['count']:,.0f}"
    return [
        Row(
            f"Spark's `schedule` of {count} rows with a ledger on `local[2]`, and `schedule_many` "
            "in two processes without one",
            "≥ 60,000/s, ratio ≥ 0.9",
            NOTHING,
            f"{ours['spark']:,.0f}/s, {ours['plain']:,.0f}/s",
            f"{ratio:.2f}",
            ours["spark"] >= 60_000 and ratio >= 0.9,
        ),
        Row(
            "the server's processor time for each of these rows",
            NOTHING,
            NOTHING,
            f"{ours['server_us']:.1f} µs",
        ),
        _rate("the same job again, which schedules nothing", ours["again"], None),
        _rate(f"Spark's `backlog` of {read} with payloads", ours["payloads"], 90_000),
        _rate("`backlog` without any message", ours["index"], 250_000),
    ]


def _rate(what: str, rate: float, least: int | None) -> Row:
    target = f"≥ {least:,}/s" if least else NOTHING
    reached = rate >= least if least else None
    return Row(what, target, NOTHING, f"{rate:,.0f}/s", reached=reached)


BENCHMARKS = [Benchmark("spark", measure, rows, sides=("ours",), rounds=1)]
