"""Forecast of the load from the backlog and from history, and of the workers it needs.

The load of a future hour has two parts: messages that the backlog already has for it, and messages
that will be sent for it later. The second part is estimated from the same hour of earlier weeks,
counting only messages that were sent at equally short notice.
"""

from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone
from statistics import NormalDist
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from kombu_delayed.errors import OptionError

from .. import FORMAT
from ..options import ReadOptions, as_texts
from .queries import deliveries

__all__ = ["arrivals", "due_per_hour", "forecast", "forecast_of", "service", "workers"]

#: Days of history from which on each hour of the week, or of the day, is looked at by itself.
WEEKLY_DAYS, DAILY_DAYS = 14, 2

LONGEST_HOURS = 24 * 35

_HOUR_SECONDS = 3600

#: What notices are rounded up to.
_NOTICE_SECONDS = 300


def due_per_hour(backlog: DataFrame) -> DataFrame:
    """The backlog by hour: `known`, and the busiest minute and second.

    Takes the columns queue and due.
    """
    unit, counts = "second", F.count("*")
    found = backlog.groupBy("queue", F.date_trunc(unit, "due").alias("at"))
    by_second = found.agg(counts.alias("known"))
    by_minute = by_second.groupBy("queue", F.date_trunc("minute", "at").alias("at")).agg(
        F.sum("known").alias("known"), F.max("known").alias("peak_second")
    )
    return by_minute.groupBy("queue", F.date_trunc("hour", "at").alias("hour")).agg(
        F.sum("known").alias("known"),
        F.max("known").alias("peak_minute"),
        F.max("peak_second").alias("peak_second"),
    )


def arrivals(happened: DataFrame) -> DataFrame:
    """Number of messages of each past hour, by how long before they were sent.

    Takes `reports.deliveries`. The notice is the time from scheduling to the beginning of the hour,
    in seconds, rounded up to five minutes; 0 is for messages sent within the hour. Messages that
    were scheduled before the first event are left out, because their notice is unknown.
    """
    ahead = F.unix_timestamp("hour") - F.unix_timestamp("scheduled_at")
    notice = F.when(F.col("due").isNull(), 0).otherwise(_rounded(ahead))
    return (
        happened.where("attempt = 1 and (due is null or scheduled_at is not null)")
        .groupBy("queue", "hour", F.greatest(notice, F.lit(0)).cast("int").alias("notice"))
        .agg(F.count("*").alias("messages"))
    )


def _rounded(seconds: Column) -> Column:
    return F.ceil(seconds / _NOTICE_SECONDS) * _NOTICE_SECONDS


def forecast(
    known: DataFrame,
    arrivals: DataFrame,
    now: datetime,
    hours: int = 24,
    confidence: float = 0.9,
) -> DataFrame:
    """The load of each queue in each of the coming full hours after `now`.

    Takes `due_per_hour` and `arrivals`. `expected` is `known` plus the mean of what came at short
    notice in `samples` hours like it; between `low` and `high` it lies with the given confidence.
    Raises OptionError.
    """
    if not 1 <= hours <= LONGEST_HOURS:
        raise OptionError(f"a forecast takes 1 to {LONGEST_HOURS} hours, not {hours!r}")
    if not 0 < confidence < 1:
        raise OptionError(f"confidence is between 0 and 1, not {confidence!r}")
    history = _history(arrivals, now)
    ahead = _ahead(arrivals.sparkSession.range(hours), now)
    queues = known.select("queue").union(arrivals.select("queue")).distinct()
    cells = ahead.crossJoin(queues)
    unseen = _unseen(cells, history, arrivals)
    spread = NormalDist().inv_cdf((1 + confidence) / 2)
    return (
        cells.join(known, ["queue", "hour"], "left")
        .join(unseen, ["queue", "hour"], "left")
        .na.fill(0)
        .withColumn("_error", spread * F.sqrt(_variance() * (1 + _one_over("samples"))))
        .select(
            *("queue", "hour", "known", "peak_minute", "peak_second", "samples"),
            (F.col("known") + F.col("mean")).alias("expected"),
            (F.col("known") + F.greatest(F.col("mean") - F.col("_error"), F.lit(0.0))).alias("low"),
            (F.col("known") + F.col("mean") + F.col("_error")).alias("high"),
        )
    )


def _variance() -> Column:
    """At least that of a process of independent arrivals: few samples may be alike by chance."""
    return F.greatest("variance", "mean")


def _one_over(name: str) -> Column:
    return F.when(F.col(name) > 0, 1 / F.col(name)).otherwise(0)


def _ahead(numbers: DataFrame, now: datetime) -> DataFrame:
    """The coming hours, each with the notice that what comes from now on has at the most."""
    start = now.astimezone(timezone.utc).replace(minute=0, second=0, microsecond=0)
    hour = F.lit(start) + F.make_dt_interval(hours=(F.col("id") + 1).cast("int"))
    seconds = F.unix_timestamp("hour") - F.lit(int(now.timestamp()))
    return numbers.select(hour.alias("hour")).withColumn("lead", _rounded(seconds).cast("int"))


def _history(arrivals: DataFrame, now: datetime) -> DataFrame:
    """All full hours since the first one that had anything, also those that had nothing."""
    last = now.astimezone(timezone.utc).replace(minute=0, second=0, microsecond=0)
    last -= timedelta(hours=1)
    past = arrivals.where(F.col("hour") <= F.lit(last))
    bounds = past.agg(F.min("hour").alias("first")).where("first is not null")
    hours = F.sequence("first", F.lit(last), F.make_dt_interval(hours=F.lit(1)))
    days = F.datediff(F.lit(last), "first")
    return bounds.select(days.alias("days"), F.explode(hours).alias("past"))


def _slot(hour: str) -> Column:
    """What two hours have in common that are alike, by how long the history is."""
    of_day = F.hour(hour)
    of_week = F.dayofweek(hour) * 24 + of_day
    days = F.col("days")
    return F.when(days >= WEEKLY_DAYS, of_week).when(days >= DAILY_DAYS, of_day).otherwise(F.lit(0))


def _unseen(cells: DataFrame, history: DataFrame, arrivals: DataFrame) -> DataFrame:
    """Of what came at too short a notice in hours like each one: mean, variance, and how many."""
    alike = cells.join(history, _slot("hour") == _slot("past"))
    came = arrivals.select(
        F.col("queue").alias("_q"), F.col("hour").alias("_h"), "notice", "messages"
    )
    is_unseen = (F.col("_q") == F.col("queue")) & (F.col("_h") == F.col("past"))
    counts = (
        alike.join(came, is_unseen & (F.col("notice") <= F.col("lead")), "left")
        .groupBy("queue", "hour", "past")
        .agg(F.coalesce(F.sum("messages"), F.lit(0)).alias("count"))
    )
    return counts.groupBy("queue", "hour").agg(
        F.avg("count").alias("mean"),
        F.coalesce(F.var_samp("count"), F.lit(0.0)).alias("variance"),
        F.count("*").alias("samples"),
    )


def service(happened: DataFrame) -> DataFrame:
    """Run times by queue: mean seconds, and variance divided by the square of the mean."""
    run = F.col("run_seconds")
    variation = F.coalesce(F.var_samp(run), F.lit(0.0)) / F.pow(F.avg(run), 2)
    return (
        happened.where("run_seconds > 0")
        .groupBy("queue")
        .agg(F.avg(run).alias("mean_seconds"), variation.alias("variation"))
    )


def workers(forecast: DataFrame, service: DataFrame, target_seconds: float) -> DataFrame:
    """A forecast with `workers`: the task slots that keep the average wait within a target.

    Takes `high` for the load. Null for a queue whose run times are not known. Raises OptionError.
    """
    if not target_seconds > 0:
        raise OptionError(f"a target is a number of seconds above 0, not {target_seconds!r}")
    rate = F.col("high") / _HOUR_SECONDS
    needed = F.udf(workers_needed, "long", useArrow=False)
    steady = needed(rate, "mean_seconds", "variation", F.lit(float(target_seconds)))
    bursts = [
        F.ceil(F.col(peak) * F.col("mean_seconds") / (length + target_seconds))
        for peak, length in (("peak_second", 1), ("peak_minute", 60))
    ]
    known = F.when(F.col("mean_seconds").isNotNull(), F.greatest(steady, *bursts))
    return forecast.join(F.broadcast(service), "queue", "left").withColumn("workers", known)


def workers_needed(
    rate: float | None, mean_seconds: float | None, variation: float | None, target_seconds: float
) -> int | None:
    """The least number of servers of an M/G/c queue whose mean wait is within a target.

    The wait is Erlang's for exponential run times, scaled by (1 + variation) / 2 (Allen-Cunneen).
    """
    if rate is None or mean_seconds is None or variation is None:
        return None
    load = rate * mean_seconds
    if load <= 0:
        return 0
    blocked, servers = 1.0, 0
    while True:
        servers += 1
        blocked = load * blocked / (servers + load * blocked)
        if servers <= load:
            continue
        waits = blocked / (1 - load / servers * (1 - blocked))
        wait = waits * mean_seconds / (servers - load) * (1 + variation) / 2
        if wait <= target_seconds or not math.isfinite(wait):
            return servers


def forecast_of(
    spark: SparkSession,
    events: DataFrame,
    *,
    now: datetime | None = None,
    hours: int = 24,
    confidence: float = 0.9,
    target_seconds: float = 60,
    **options: Any,
) -> DataFrame:
    """The forecast for a broker from its history, with the workers that it needs.

    `options` are those of `celery_ext.spark.backlog`. Raises OptionError.
    """
    now = now or datetime.now(timezone.utc)
    until = now + timedelta(hours=hours + 1)
    options = {**options, "due_from": now, "due_to": until}
    ReadOptions.parse(options)
    # Columns that are not asked for are not fetched: no message is.
    waiting = spark.read.format(FORMAT).schema("queue string, due timestamp")
    happened = deliveries(events)
    known = due_per_hour(waiting.options(**as_texts(options)).load())
    load = forecast(known, arrivals(happened), now, hours, confidence)
    return workers(load, service(happened), target_seconds)
