"""The job `report`: all reports as Parquet tables, and one self-contained HTML page."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from functools import reduce
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from kombu_delayed.errors import DelayedError

from ..events.archive_files import pattern_in
from . import plots, queries
from .failures import by_error
from .formatting import duration, moment, number, share

#: The most rows of a table on the page; the Parquet tables have all.
LIMIT = 50

#: The latest and the longest overdue messages on the page.
WORST = 100

PAGE = "report.html"

#: Tables that are written in parallel, because small ones would leave a cluster idle.
AT_ONCE = 4

Row = dict[str, Any]


class ReportError(DelayedError):
    """There is nothing to report on."""


def tables(
    events: DataFrame,
    deliveries: DataFrame,
    target_seconds: float,
    as_of: datetime | None = None,
    failures: DataFrame | None = None,
) -> dict[str, DataFrame]:
    """All reports by the names of their tables."""
    waiting = queries.never_delivered(events, as_of)
    seconds = queries.part_seconds(queries.span_seconds(deliveries))
    failed = {} if failures is None else {"failures": by_error(failures)}
    return {
        **failed,
        "lateness_over_time": queries.lateness_over_time(deliveries, seconds),
        "deliveries_over_time": queries.deliveries_over_time(deliveries, seconds),
        "run_times": queries.run_times(deliveries, "queue", "task"),
        "jobs": queries.bulk_jobs(events),
        "total": _total(events, waiting)
        .crossJoin(_summary(deliveries, target_seconds))
        .withColumn("part_seconds", F.lit(seconds)),
        "queues": _summary(deliveries, target_seconds, "queue"),
        "lateness_by_task": queries.lateness(deliveries, "queue", "task"),
        "lateness_by_tenant": queries.lateness(deliveries, "tenant"),
        "lateness_by_hour": queries.lateness(deliveries, "hour"),
        "lateness_by_queue_and_hour": queries.lateness(deliveries, "queue", "hour"),
        "histogram": queries.histogram(deliveries),
        "throughput": queries.throughput(events, "queue"),
        "workers": queries.per_worker(deliveries, "queue"),
        "worst": queries.worst(deliveries, WORST),
        "never_delivered": waiting,
    }


def _summary(deliveries: DataFrame, target_seconds: float, *by: str) -> DataFrame:
    """Lateness, failures and evenness side by side."""
    parts = [
        queries.later_than(deliveries, target_seconds, *by).drop("messages"),
        queries.rates(deliveries, *by).drop("messages"),
        queries.evenness(deliveries, *by).drop("deliveries"),
    ]
    start = queries.lateness(deliveries, *by)
    if by:
        return reduce(lambda left, right: left.join(right, [*by], "full"), parts, start)
    return reduce(lambda left, right: left.crossJoin(right), parts, start)


def _total(events: DataFrame, waiting: DataFrame) -> DataFrame:
    span = events.agg(
        F.min("at").alias("first_at"), F.max("at").alias("last_at"), F.count("*").alias("events")
    )
    return span.crossJoin(waiting.agg(F.count("*").alias("waiting")))


def report(
    events: DataFrame,
    out: str,
    target_seconds: float = 60,
    *,
    as_of: datetime | None = None,
    title: str = "Delayed tasks",
    page_path: str | None = None,
    failures: DataFrame | None = None,
    progress: Callable[[str], Any] = lambda name: None,
) -> str:
    """Write all reports on some events as tables in `out`, and a page; returns the page's path.

    An earlier report in `out` is replaced. The page is a local file, by default in `out`, which
    must be a local directory then. `failures` are those of `reports.failures`. `progress` is
    called after each table. Raises ReportError if nothing was delivered, if a path for the page is
    needed and missing, or if a path cannot be used.
    """
    path = _page_file(out, page_path)
    deliveries = queries.deliveries(events).persist()
    try:
        if deliveries.isEmpty():
            raise ReportError(
                "there is no delivery among these events: nothing to report on. Do workers run, "
                "and is the transport option delayed_events above 0?"
            )
        found = tables(events, deliveries, target_seconds, as_of, failures)
        _write(found, out, progress)
    finally:
        deliveries.unpersist()
    written = _Written(events.sparkSession, out)
    path.write_text(page(written, target_seconds, title, failures is not None), "utf-8")
    return str(path)


def _page_file(out: str, page_path: str | None) -> Path:
    """The file of the page, in a directory that is made if it is missing. Raises ReportError."""
    if fault := pattern_in(out):
        raise ReportError(fault)
    path = Path(page_path or _in_directory(out))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReportError(f"the page cannot be written to {path}: {error.strerror}") from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ReportError(f"the page cannot be written to {path}: it is a directory, or protected")
    return path


def _in_directory(out: str) -> Path:
    url = urlsplit(out, allow_fragments=False)
    if url.scheme not in ("", "file"):
        raise ReportError(
            f"the tables go to {out}, which is not a directory of this machine: choose a file for "
            "the page (--page, page_path)"
        )
    return Path(url.path if url.scheme else out, PAGE)


def _write(found: dict[str, DataFrame], out: str, progress: Callable[[str], Any]) -> None:
    def write(name: str) -> str:
        found[name].coalesce(1).write.mode("overwrite").parquet(f"{out}/{name}")
        return name

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for name in pool.map(write, found):
            progress(name)


class _Written:
    """The written tables, of which the page shows some rows."""

    def __init__(self, spark: SparkSession, out: str) -> None:
        self._spark, self._out = spark, out

    def table(self, name: str) -> DataFrame:
        return self._spark.read.parquet(f"{self._out}/{name}")

    def rows(self, name: str, *order: str, limit: int = LIMIT) -> list[Row]:
        """The first rows of a table by columns; `-` in front of one is descending."""
        return _rows(self.table(name), *order, limit=limit)

    def sums(self, name: str, by: str, value: str, *order: str, limit: int) -> list[Row]:
        """The first rows of a table, summed over its other columns."""
        found = self.table(name).groupBy(by).agg(F.sum(value).alias(value))
        return _rows(found, *order, limit=limit)


def _rows(table: DataFrame, *order: str, limit: int) -> list[Row]:
    by = [F.desc(each[1:]) if each.startswith("-") else F.asc(each) for each in order]
    table = table.orderBy(*by) if by else table
    return [_in_utc(row.asDict()) for row in table.limit(limit).collect()]


def _in_utc(row: Row) -> Row:
    """Convert times to UTC. Spark returns naive times in this process's time zone."""
    return {
        name: value.astimezone(timezone.utc) if isinstance(value, datetime) else value
        for name, value in row.items()
    }


#: The most intervals of a plot: the days of a century.
_MOST_PARTS = 36_600

#: The most workers that are read; a plot shows the first and last of them.
_MOST_WORKERS = 100_000


def page(written: _Written, target_seconds: float, title: str, has_failures: bool = False) -> str:
    (total,) = written.rows("total")
    late = written.rows("lateness_over_time", "part", limit=_MOST_PARTS)
    load = written.rows("deliveries_over_time", "part", limit=_MOST_PARTS)
    length = timedelta(seconds=total["part_seconds"])
    buckets = written.rows("histogram")
    order = ("-deliveries", "worker")
    workers = written.sums("workers", "worker", "deliveries", *order, limit=_MOST_WORKERS)
    tenants = written.rows("lateness_by_tenant", "-p99_seconds", "tenant")
    shown = {"number": number, "duration": duration, "share": share, "id": str, "time": moment}
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=False)
    environment.globals.update(number=number, duration=duration, moment=moment)
    template = files(__package__).joinpath("report_page.html").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        title=title,
        zone="UTC",
        target_seconds=target_seconds,
        limit=LIMIT,
        most_workers=plots.MOST_WORKERS,
        shown={**shown, "text": lambda text: text or "(none)"},
        total=total,
        length=length.total_seconds(),
        run_times=written.rows("run_times", "-run_p95_seconds", "task"),
        jobs=written.rows("jobs", "-last_at", "job"),
        failures=written.rows("failures", "-failures", "task") if has_failures else None,
        unnamed=[row["worker"] for row in workers if "@" not in (row["worker"] or "")],
        tiles=_tiles(total),
        plots={
            "lateness": Markup(
                plots.lateness_over_time(late, length, target_seconds) if late else ""
            ),
            "load": Markup(plots.load_over_time(load, length)),
            "histogram": Markup(plots.histogram(buckets, queries.EDGES_SECONDS) if buckets else ""),
            "workers": Markup(plots.workers(workers)),
        },
        queues=written.rows("queues", "-messages", "queue"),
        tasks=written.rows("lateness_by_task", "-p99_seconds", "task"),
        tenants=[row for row in tenants if row["tenant"]] and tenants,
        worst=written.rows("worst", "-lateness_seconds", limit=WORST),
        waiting=written.rows("never_delivered", "-overdue_seconds", "id", limit=WORST),
    )


def _tiles(total: Row) -> list[tuple[str, str, bool]]:
    """The tiles of the page: value, label, and whether it needs attention."""
    return [
        (number(total["deliveries"]), "deliveries", False),
        (duration(total["p50_seconds"]), "median lateness", False),
        (duration(total["p95_seconds"]), "p95 lateness", False),
        (duration(total["p99_seconds"]), "p99 lateness", False),
        (duration(total["max_seconds"]), "worst lateness", False),
        (share(total["late_share"]), "later than the target", bool(total["late"])),
        (share(total["redelivered_rate"]), "redelivered", False),
        (share(total["dead_rate"]), "dead", bool(total["dead"])),
        (number(total["max_over_min"]), "busiest ÷ idlest worker", False),
        (number(total["waiting"]), "due, never delivered", bool(total["waiting"])),
    ]
