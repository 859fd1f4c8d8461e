"""Selects a forecasting method and the width of intervals by testing them on the last days.

Each of the last days is forecast with each method, from the data before that day. Each queue uses
the method with the smallest error, or the mean of similar hours if it has too little data.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from .similar_hours import DAILY_DAYS, WEEKLY_DAYS, hours_of, levels, unseen

__all__ = ["backtest"]

#: Days that are forecast for the test, and the hours with messages that a queue needs in them.
DAYS, LEAST_HOURS = 7, 24

#: The methods. The plain mean of similar hours comes first, because it wins a tie.
MEAN, LEVEL, TREND = METHODS = ("mean", "level", "trend")


def factor(method: str) -> Column:
    """The factor of a method, for the mean of similar hours."""
    factors = {LEVEL: F.col("level"), TREND: F.col("level") * F.col("growth")}
    return F.coalesce(factors.get(method, F.lit(1.0)), F.lit(1.0))


def by_method(value: Callable[[str], Column]) -> Column:
    """The value for a row's method; that for the plain mean if it has none."""
    found = value(MEAN)
    for name in METHODS[1:]:
        found = F.when(F.col("method") == name, value(name)).otherwise(found)
    return found


def deviation() -> Column:
    """The standard deviation of an hour's messages from the mean of similar hours.

    At least that of independent arrivals, because a few samples may be alike by chance.
    """
    one_over = F.when(F.col("samples") > 0, 1 / F.col("samples")).otherwise(0)
    return F.sqrt(F.greatest("variance", "mean") * (1 + one_over))


def unit() -> Column:
    """The unit of `spread`: the standard deviation, or one message if that is more."""
    return F.greatest(deviation(), F.lit(1.0))


def backtest(arrivals: DataFrame, now: datetime, confidence: float = 0.9) -> DataFrame:
    """For each queue, the `method` with the smallest error in the last days, and that error.

    Takes `forecast.arrivals`. `error` and `mean_error` are the sum of the errors of all hours
    divided by the number of messages, for this method and for the plain mean. `spread` is the half
    width of an interval in multiples of `unit`, `coverage` the share of hours within intervals
    computed from the other days. Queues with too little data are missing.
    """
    hours = hours_of(arrivals, now).persist()
    tried = _tried(arrivals, hours, now).persist()
    best = _best(tried)
    off = tried.join(best, "queue").select(
        "queue", "origin", (by_method(_off) / F.col("unit")).alias("off")
    )
    needed = F.percentile("off", F.lit(confidence)).alias("spread")
    others = off.select("queue", F.col("origin").alias("_day"), "off")
    days = off.select("queue", "origin").distinct()
    by_day = days.join(others, "queue").where("origin != _day")
    by_day = by_day.groupBy("queue", "origin").agg(needed.alias("_needed"))
    within = F.avg((F.col("off") <= F.col("_needed")).cast("double")).alias("coverage")
    covered = off.join(by_day, ["queue", "origin"]).groupBy("queue").agg(within)
    found = best.join(off.groupBy("queue").agg(needed), "queue")
    return found.join(covered, "queue", "left")


def _tried(arrivals: DataFrame, hours: DataFrame, now: datetime) -> DataFrame:
    """Forecasts of each method for hours of the last days with real or expected messages."""
    origins = _origins(hours, now)
    after = F.make_dt_interval(hours=F.col("id").cast("int"))
    ahead = origins.crossJoin(arrivals.sparkSession.range(24)).select(
        "origin",
        (F.col("origin") + after).alias("hour"),
        (F.col("id") * 3600).cast("int").alias("lead"),
    )
    cells = ahead.crossJoin(arrivals.select("queue").distinct())
    came = cells.join(arrivals, ["queue", "hour"]).where("notice <= lead")
    actual = came.groupBy("origin", "queue", "hour").agg(F.sum("messages").alias("actual"))
    found = (
        unseen(cells, hours, arrivals)
        .join(actual, ["origin", "queue", "hour"], "left")
        .na.fill(0, ["actual"])
        .join(levels(origins, hours, arrivals), ["origin", "queue"], "left")
        .where("mean > 0 or actual > 0")
    )
    off = {f"off_{name}": F.abs(F.col("actual") - F.col("mean") * factor(name)) for name in METHODS}
    return found.withColumns({"unit": unit(), **off})


def _origins(hours: DataFrame, now: datetime) -> DataFrame:
    """The starts of the last full days with enough history before them.

    Enough means that similar hours are defined in the same way as now.
    """
    today = now.astimezone(timezone.utc).replace(hour=0, minute=0, second=0, microsecond=0)
    given = [(today - timedelta(days=day + 1),) for day in range(DAYS)]
    days = hours.sparkSession.createDataFrame(given, "origin timestamp")
    begun = hours.agg(F.min("first").alias("first"))
    before = F.datediff("origin", "first")
    all_days = F.datediff(F.lit(today), "first")
    least = F.when(all_days >= WEEKLY_DAYS, WEEKLY_DAYS).otherwise(DAILY_DAYS)
    return days.crossJoin(begun).where(before >= least).select("origin")


def _off(method: str) -> Column:
    return F.col(f"off_{method}")


def _best(tried: DataFrame) -> DataFrame:
    sums = tried.groupBy("queue").agg(
        *(F.sum(f"off_{name}").alias(f"off_{name}") for name in METHODS),
        F.sum("actual").alias("actual"),
        F.count_if(F.col("actual") > 0).alias("hours"),
    )
    least = F.least(*(f"off_{name}" for name in METHODS))
    method = F.coalesce(*(F.when(F.col(f"off_{name}") <= least, name) for name in METHODS))
    return (
        sums.where(F.col("hours") >= LEAST_HOURS)
        .withColumn("method", method)
        .select(
            "queue",
            "method",
            (by_method(_off) / F.col("actual")).alias("error"),
            (F.col(f"off_{MEAN}") / F.col("actual")).alias("mean_error"),
        )
    )
