"""Forecast of the load from the backlog and from history, and of the workers it needs.

The load of a future hour has two parts: messages that the backlog already has for it, and messages
that will be sent for it later. The second part is estimated from the same hour of earlier weeks,
counting only messages that were sent at equally short notice. It is corrected for a trend if that
would have been nearer in the last days.
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
from .backtest import MEAN, backtest, by_method, deviation, factor, unit
from .queries import HOUR_SECONDS, deliveries, part_of
from .similar_hours import hour_of, hours_of, levels, unseen

__all__ = ["arrivals", "due_per_hour", "forecast", "forecast_of", "service", "workers"]

LONGEST_HOURS = 24 * 35

#: Notices are rounded up to multiples of this.
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
    return by_minute.groupBy("queue", part_of(F.col("at"), HOUR_SECONDS).alias("hour")).agg(
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
        .groupBy("queue", "hour", F.greatest(notice, F.lit(0)).cast("bigint").alias("notice"))
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

    Takes `due_per_hour` and `arrivals`. A `now` without a time zone is in UTC. `expected` is
    `known` plus the messages that are expected at short notice, from the mean of `samples` similar
    hours. `low` and `high` bound it with the given confidence. `method`, `error`, `mean_error` and
    `coverage` are those of `backtest`, null if there is too little history. Raises OptionError.
    """
    _check(hours, confidence)
    now = now if now.tzinfo else now.replace(tzinfo=timezone.utc)
    past = arrivals.where(F.col("hour") < F.lit(hour_of(now))).persist()
    tested = backtest(past, now, confidence)
    history = hours_of(past, now)
    ahead = _ahead(arrivals.sparkSession.range(hours), now).withColumn("origin", F.lit(now))
    queues = known.select("queue").union(arrivals.select("queue")).distinct()
    cells = ahead.crossJoin(queues)
    level = levels(ahead.select("origin").distinct(), history, past).drop("origin")
    normal = NormalDist().inv_cdf((1 + confidence) / 2)
    mean, error = F.col("_mean"), F.col("_error")
    return (
        cells.drop("origin")
        .join(known, ["queue", "hour"], "left")
        .join(unseen(cells, history, past).drop("origin"), ["queue", "hour"], "left")
        .na.fill(0)
        .join(level, "queue", "left")
        .join(tested, "queue", "left")
        .withColumn("_mean", F.col("mean") * by_method(factor))
        .withColumn("_error", F.coalesce(F.col("spread") * unit(), normal * deviation()))
        .select(
            *("queue", "hour", "known", "peak_minute", "peak_second", "samples"),
            (F.col("known") + mean).alias("expected"),
            (F.col("known") + F.greatest(mean - error, F.lit(0.0))).alias("low"),
            (F.col("known") + mean + error).alias("high"),
            F.coalesce("method", F.lit(MEAN)).alias("method"),
            *("error", "mean_error", "coverage"),
        )
    )


def _check(hours: int, confidence: float) -> None:
    if not 1 <= hours <= LONGEST_HOURS:
        raise OptionError(f"a forecast takes 1 to {LONGEST_HOURS} hours, not {hours!r}")
    if not 0 < confidence < 1:
        raise OptionError(f"confidence is between 0 and 1, not {confidence!r}")


def _ahead(numbers: DataFrame, now: datetime) -> DataFrame:
    """The coming hours, each with the longest notice of messages sent from now on."""
    hour = F.lit(hour_of(now)) + F.make_dt_interval(hours=(F.col("id") + 1).cast("int"))
    seconds = F.unix_timestamp("hour") - F.lit(int(now.timestamp()))
    return numbers.select(hour.alias("hour")).withColumn("lead", _rounded(seconds).cast("int"))


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
    rate = F.col("high") / HOUR_SECONDS
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
    _check(hours, confidence)
    now = now or datetime.now(timezone.utc)
    until = now + timedelta(hours=hours + 1)
    options = {**options, "due_from": now, "due_to": until}
    ReadOptions.parse(options)
    # Only these columns are read, so no messages are fetched.
    waiting = spark.read.format(FORMAT).schema("queue string, due timestamp")
    happened = deliveries(events)
    known = due_per_hour(waiting.options(**as_texts(options)).load())
    load = forecast(known, arrivals(happened), now, hours, confidence)
    return workers(load, service(happened), target_seconds)
