"""Spark's `schedule` compared with hand-written code of a user."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timezone
from functools import partial
from time import perf_counter
from typing import Any

from celery_ext.spark.options import WriteOptions
from tests.benchmarks.app import create_app
from tests.benchmarks.bulk import delayed_of
from tests.benchmarks.report import Figures, Line, benchmark
from tests.benchmarks.rig import Rig, cpu_seconds
from tests.benchmarks.spark import check_parser, client_of, reminders, spark_session, write_rate

#: The default budget of `schedule`.
DEFAULT_BUDGET_MS = WriteOptions.latency_budget_ms


def in_bulk(url: str, rows: Iterable[Any]) -> None:
    """`schedule_many` in each task of Spark."""
    with delayed_of(url) as delayed:
        given = (
            (row.task, (*row.args,), {}, row.eta.astimezone(timezone.utc), {"task_id": row.id})
            for row in rows
        )
        delayed.schedule_many(given, progress=None)


def singly(url: str, rows: Iterable[Any]) -> None:
    """`apply_async` for each row."""
    work = create_app(url).tasks["work"]
    for row in rows:
        work.apply_async((*row.args,), task_id=row.id, eta=row.eta.astimezone(timezone.utc))


def by_hand(
    spark: Any, url: str, write: Callable[[str, Iterable[Any]], None], first: int, last: int
) -> float:
    """Rows per second."""
    began = perf_counter()
    reminders(spark, first, last).foreachPartition(partial(write, url))
    return (last - first) / (perf_counter() - began)


def rates(url: str, count: int) -> Figures:
    """The ways take turns, so that other load on the machine hits all."""
    few = count // 10
    with spark_session() as spark, client_of(url) as client:
        write_rate(spark, url, -few, 0)
        by_hand(spark, url, in_bulk, -2 * few, -few)
        before = cpu_seconds(client)
        figures = {"spark": write_rate(spark, url, 0, count)}
        figures["server_us"] = (cpu_seconds(client) - before) / count * 1e6
        figures["many"] = by_hand(spark, url, in_bulk, count, 2 * count)
        figures["one"] = by_hand(spark, url, singly, 2 * count, 2 * count + few)
        figures["safe"] = write_rate(spark, url, 3 * count, 4 * count, DEFAULT_BUDGET_MS)
    return {"count": float(count), **figures}


@benchmark(
    "spark-by-hand",
    Line(
        "Spark's `schedule` of {count:,.0f} rows, with a ledger and without a latency budget, and "
        "`schedule_many` within `foreachPartition`, without a ledger",
        "{spark:,.0f}/s, {many:,.0f}/s",
        "ratio ≥ 1.2",
        ("spark", "many"),
        lambda f: f["spark"] / f["many"] >= 1.2,
    ),
    Line(
        "the same and `apply_async` within `foreachPartition`",
        "{spark:,.0f}/s, {one:,.0f}/s",
        "ratio ≥ 10",
        ("spark", "one"),
        lambda f: f["spark"] / f["one"] >= 10,
    ),
    Line("the same `schedule` with the default budget", "{safe:,.0f}/s"),
    Line(
        "the server's processor time for each row of `schedule`",
        "{server_us:.1f} µs",
        "≤ 12 µs",
        reached=lambda f: f["server_us"] <= 12,
    ),
    rounds=1,
)
def spark_by_hand(rig: Rig) -> Figures:
    check_parser()
    return rig.apart(rates, rig.url(), rig.scaled(300_000, 10_000), seconds=900)
