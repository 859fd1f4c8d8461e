"""Lifecycle events from the broker into Parquet."""

from __future__ import annotations

import statistics
from time import perf_counter
from typing import Any

from redis import Redis

from tests.benchmarks.report import NOTHING, Benchmark, Figures, Row
from tests.benchmarks.rig import Rig
from tests.benchmarks.spark import check_parser, spark_session
from tests.kit.told import told

QUEUES = ("mail", "far")
WARM_UP = 20_000
#: Events in one call.
BATCH = 1_000
#: Events per second, at least.
TARGET = 55_000


def write_events(url: str, count: int) -> None:
    """Events as a worker's acks leave them, in two queues."""
    with Redis.from_url(url.removeprefix("delayed+")) as client:
        for first in range(0, count, BATCH):
            pipeline = client.pipeline(transaction=False)
            for number in range(first, min(first + BATCH, count)):
                fields = told(f"{number:036}", task="shop.remind", due_ms=number)
                pipeline.xadd(f"{{{QUEUES[number % 2]}}}:events", fields)
            pipeline.execute()


def archive_rate(spark: Any, url: str, path: str, count: int) -> float:
    """Events per second that are new and come into an archive."""
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
        archive_rate(spark, url, path, WARM_UP)
        return [archive_rate(spark, url, path, count) for _ in range(rounds)]


def measure(rig: Rig) -> Figures:
    check_parser()
    count = rig.scaled(400_000, 10_000)
    path = str(rig.directory / "archive")
    rates = rig.apart(archive_rates, rig.url(), path, count, rig.scaled(3, 1), seconds=300)
    return {"count": float(count), "archive": statistics.median(rates)}


def rows(ours: Figures) -> list[Row]:
    return [
        Row(
            f"Spark's `archive` of {ours['count']:,.0f} new lifecycle events to Parquet on "
            "`local[2]`",
            f"≥ {TARGET:,}/s",
            NOTHING,
            f"{ours['archive']:,.0f}/s",
            reached=ours["archive"] >= TARGET,
        )
    ]


BENCHMARKS = [Benchmark("spark-archive", measure, rows, sides=("ours",), rounds=1)]
