"""Messages sent at short notice in similar hours, and the change of the load between weeks."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from .queries import HOUR_SECONDS, part_of

#: The days of history needed to separate the hours of the week, or those of the day.
WEEKLY_DAYS, DAILY_DAYS = 14, 2

#: The bounds of the growth from one week to the next.
LEAST_GROWTH, MOST_GROWTH = 0.5, 2.0

_WEEK_SECONDS = 7 * 86_400


def hour_of(now: datetime) -> datetime:
    """The start of the current hour, in UTC."""
    return now.astimezone(timezone.utc).replace(minute=0, second=0, microsecond=0)


def hours_of(arrivals: DataFrame, now: datetime) -> DataFrame:
    """All full hours since the first one with messages, including empty ones."""
    bounds = arrivals.agg(F.min("hour").alias("first"))
    hours = F.sequence("first", F.lit(hour_of(now) - timedelta(hours=1)), F.expr("INTERVAL 1 HOUR"))
    return bounds.where("first is not null").select("first", F.explode(hours).alias("past"))


def slot(hour: str, days: Column) -> Column:
    """The key that similar hours share, depending on the days of history."""
    of_day = F.hour(hour)
    of_week = F.dayofweek(hour) * 24 + of_day
    return F.when(days >= WEEKLY_DAYS, of_week).when(days >= DAILY_DAYS, of_day).otherwise(F.lit(0))


def unseen(cells: DataFrame, hours: DataFrame, arrivals: DataFrame) -> DataFrame:
    """The mean and variance of messages sent at short notice in hours similar to each cell.

    Also the number of these hours. A cell is an hour of a queue that is forecast at `origin`:
    messages that are yet to be sent for it have a notice of at most `lead` seconds. Only hours
    before the origin count.
    """
    begun = part_of(F.col("origin"), HOUR_SECONDS)
    last = begun - F.expr("INTERVAL 1 HOUR")
    days = F.datediff(last, "first")
    is_alike = (F.col("past") < begun) & (slot("hour", days) == slot("past", days))
    came = arrivals.select(
        F.col("queue").alias("_q"), F.col("hour").alias("_h"), "notice", "messages"
    )
    is_unseen = (F.col("_q") == F.col("queue")) & (F.col("_h") == F.col("past"))
    counts = (
        cells.join(hours, is_alike)
        .join(came, is_unseen & (F.col("notice") <= F.col("lead")), "left")
        .groupBy("origin", "queue", "hour", "past")
        .agg(F.coalesce(F.sum("messages"), F.lit(0)).alias("count"))
    )
    return counts.groupBy("origin", "queue", "hour").agg(
        F.avg("count").alias("mean"),
        F.coalesce(F.var_samp("count"), F.lit(0.0)).alias("variance"),
        F.count("*").alias("samples"),
    )


def levels(origins: DataFrame, hours: DataFrame, arrivals: DataFrame) -> DataFrame:
    """The last week before each origin, relative to the mean week and to the week before it.

    `level` and `growth` are 1 if a queue has too little data.
    """
    first = hours.agg(F.min("first").alias("first"))
    begun = F.unix_timestamp(part_of(F.col("origin"), HOUR_SECONDS))
    age, known = begun - F.unix_timestamp("hour"), begun - F.unix_timestamp("first")
    total = arrivals.groupBy("queue", "hour").agg(F.sum("messages").alias("messages"))
    of_week = lambda n: F.sum(  # noqa: E731
        F.when((age > n * _WEEK_SECONDS) & (age <= (n + 1) * _WEEK_SECONDS), F.col("messages"))
    )
    weeks = F.max(known) / _WEEK_SECONDS
    growth = F.least(F.greatest(of_week(0) / of_week(1), F.lit(LEAST_GROWTH)), F.lit(MOST_GROWTH))
    return (
        origins.crossJoin(first)
        .join(total, (age > 0) & (known >= 2 * _WEEK_SECONDS))
        .groupBy("origin", "queue")
        .agg(
            (of_week(0) / (F.sum("messages") / weeks)).alias("level"),
            growth.alias("growth"),
        )
        .na.fill(1.0, ["level", "growth"])
    )
