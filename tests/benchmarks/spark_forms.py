"""The cost for Spark of a packed or compressed backlog."""

from __future__ import annotations

import random
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any

from tests.benchmarks.forms import MORE, argument, cost, in_turns
from tests.benchmarks.report import Figures, benchmark, medians
from tests.benchmarks.rig import Rig
from tests.benchmarks.spark import (
    PAYLOADS,
    START,
    check_parser,
    client_of,
    read_rate,
    spark_session,
)

TURNS = 3
VERBS = {
    "write": "Spark's `schedule` of {count:,.0f} tasks with 300 B of arguments, for a task",
    "read": "Spark's `backlog` of these, with payloads, for a task",
}


def write_file(path: Path, count: int) -> None:
    """Tasks whose arguments are like those of `forms`."""
    import pyarrow
    from pyarrow import parquet

    dice = random.Random(1)
    rows = [
        {
            "id": f"{n}",
            "task": "work",
            "args": {"order": argument(dice)},
            "eta": START + timedelta(seconds=n),
        }
        for n in range(count)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=count // 8)


def seconds_of(spark: Any, url: str, path: Path, form: str, few: int, count: int) -> Figures:
    """Seconds for a job that writes all rows of a file, and for one that reads them."""
    from pyspark.sql import functions as F

    from celery_ext.spark import schedule

    options = {"delayed_compression": "zstd"} if form == "zstd" else {}

    def write(rows: Any, job: str) -> None:
        report = schedule(
            rows, broker=url, job_id=job, latency_budget_ms=0, transport_options=options
        )
        if report.accepted != rows.count():
            raise RuntimeError(f"Spark has scheduled {report}")

    rows = spark.read.parquet(str(path))
    warm_up = rows.limit(few).withColumn("id", F.concat(F.lit("warm-up-"), "id"))
    write(warm_up, "warm-up")  # the queue becomes large, and has a dictionary
    read_rate(spark, url, PAYLOADS, few)
    began = perf_counter()
    write(rows, "benchmark")
    written = perf_counter() - began
    return {"write": written, "read": (count + few) / read_rate(spark, url, PAYLOADS, count + few)}


def turn(url: str, path: Path, form: str, few: int, count: int) -> Figures:
    """One form, in a session of its own."""
    daemon = {"spark.python.daemon.module": "tests.benchmarks.plain_daemon"}
    with spark_session(**(daemon if form == "plain" else {})) as spark, client_of(url) as client:
        client.flushall()
        found = seconds_of(spark, url, path, form, few, count)
        plain = client.exists("{celery}:messages") and client.hlen("{celery}:messages") > count
        if bool(plain) != (form == "plain"):
            raise RuntimeError(f"the messages are not {form}")
        return {f"{form} {verb}": seconds / count * 1e6 for verb, seconds in found.items()}


@benchmark(
    "spark-forms", *(cost(VERBS[verb], verb, form) for verb in VERBS for form in MORE), rounds=1
)
def spark_forms(rig: Rig) -> Figures:
    """In turns, with each form first in one of them."""
    check_parser()
    count, path = rig.scaled(200_000, 10_000), rig.directory / "tasks.parquet"
    write_file(path, count)
    found = []
    for order in in_turns(rig.scaled(TURNS, 1)):
        each: Figures = {}
        for form in order:
            each |= rig.apart(turn, rig.url(), path, form, count // 20, count, seconds=600)
        found.append(each)
    return {"count": float(count), **medians(found)}
