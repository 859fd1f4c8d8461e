"""Reports from lifecycle events: lateness, throughput, failures, evenness.

Each function transforms a DataFrame with the columns of the source `kombu_delayed_events`, or of
`deliveries`. Nothing is collected on the driver.
"""

from __future__ import annotations

from datetime import datetime

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from kombu_delayed.inspection.events import EVENTS
from kombu_delayed.message.envelope import eta_to_ms

#: The percentiles of a report, by column.
PERCENTILES = {"p50_seconds": 0.5, "p95_seconds": 0.95, "p99_seconds": 0.99}

#: The events that end a delivery.
ENDS = ("acked", "dropped", "released", "reclaimed", "buried")

#: The edges of a histogram of lateness.
EDGES_SECONDS = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0)

#: The possible lengths of the intervals of a plot, and about how many it has at most.
PARTS_SECONDS, MOST_PARTS = (1, 5, 15, 60, 300, 900, 3600, 21_600, 86_400), 150

HOUR_SECONDS = 3600

_SCHEDULES = ("scheduled", "rescheduled")

#: Events that may give a message another due time.
_DUES = (*_SCHEDULES, "replayed")

_MESSAGE = ("queue", "id")

#: The next event of a message that its consumer put back: for a limit, or delayed by a policy.
_PUT_BACK = (
    "_then.event <=> 'waiting' or (_then.event <=> 'scheduled' and _then.consumer <=> consumer)"
)

#: Percentiles are exact for up to this many values. Above, the error in rank is 1 in this number.
_ACCURACY = 10_000


def event_order() -> tuple[Column, Column]:
    """Events of a queue in the order in which they happened; the stream's ids are "ms-number"."""
    return F.col("at"), F.split("stream_id", "-")[1].cast("long")


def instant(at: datetime) -> Column:
    """A time, in UTC if it has no zone: Spark would take it to be in the zone of this machine."""
    return F.timestamp_millis(F.lit(eta_to_ms(at)))


def of_last_due(events: DataFrame) -> DataFrame:
    """The events of each message for its last due time.

    A retry is scheduled before the message of the failed attempt is acked.
    """
    order = F.when(F.col("event").isin(*_DUES), F.struct(*event_order()))
    last = F.max_by(F.struct("due"), order).over(Window.partitionBy(*_MESSAGE))
    return events.withColumn("_due", last).where("_due is null or due <=> _due.due").drop("_due")


def _seconds(start: str, end: str) -> Column:
    return (F.unix_millis(end) - F.unix_millis(start)) / 1000.0


def deliveries(events: DataFrame) -> DataFrame:
    """One row for each delivery: its worker, its lateness, how it ended.

    `lateness_seconds` is delivered - due, null for a message that was never delayed. `run_seconds`
    is acked - delivered by the same consumer, null if there is no ack. `attempt` counts the
    deliveries of a message for one due time, from 1. `scheduled_at` is when the due time was set,
    null if that was before the first event. `hour` is that of the due time, or without one that of
    the delivery. A message that its consumer put back, for a limit or a policy, was not delivered.
    """
    ordered = event_order()
    message = Window.partitionBy(*_MESSAGE).orderBy(*ordered)
    holder = Window.partitionBy(*_MESSAGE, "consumer").orderBy(*ordered)
    attempts = Window.partitionBy(*_MESSAGE, "due").orderBy(*ordered)
    scheduled_at = F.last(F.when(F.col("event").isin(*_SCHEDULES), F.col("at")), ignorenulls=True)
    return (
        events.where(F.col("event").isin(*_SCHEDULES, "delivered", "waiting", *ENDS))
        .withColumn("_then", F.lead(F.struct("event", "consumer")).over(message))
        .where(f"event != 'waiting' and not (event = 'delivered' and ({_PUT_BACK}))")
        .withColumn("scheduled_at", F.when(F.col("due").isNotNull(), scheduled_at.over(message)))
        .withColumn("_next", F.lead(F.struct("event", "at")).over(holder))
        .where("event = 'delivered'")
        .withColumn("attempt", F.row_number().over(attempts))
        .withColumn("_end", F.when(F.col("_next.event").isin(*ENDS), F.col("_next")))
        .select(
            *("queue", "id", "task", "tenant", "due", "scheduled_at"),
            F.col("at").alias("delivered_at"),
            *("consumer", "worker", "attempt", "deliveries"),
            F.col("_end.event").alias("ended"),
            F.col("_end.at").alias("ended_at"),
            _seconds("due", "at").alias("lateness_seconds"),
            F.when(F.col("_end.event") == "acked", _seconds("at", "_end.at")).alias("run_seconds"),
            part_of(F.coalesce("due", "at"), HOUR_SECONDS).alias("hour"),
        )
    )


def lateness(deliveries: DataFrame, *by: str) -> DataFrame:
    """Lateness of first deliveries in seconds: p50, p95, p99 and the worst.

    One row for each value of the columns `by`: queue, task, tenant, worker, hour.
    """
    return _spread(_first(deliveries), "lateness_seconds", "messages", "", *by)


def _spread(frame: DataFrame, column: str, count: str, prefix: str, *by: str) -> DataFrame:
    """Percentiles and the maximum of a column, and the number of its values as `count`."""
    marks = F.percentile_approx(column, list(PERCENTILES.values()), _ACCURACY)
    highest = F.max(column).alias("_max")
    found = frame.groupBy(*by).agg(F.count("*").alias(count), marks.alias("_marks"), highest)
    named = [F.col("_marks")[n].alias(f"{prefix}{name}") for n, name in enumerate(PERCENTILES)]
    return found.select(*by, count, *named, F.col("_max").alias(f"{prefix}max_seconds"))


def _first(deliveries: DataFrame) -> DataFrame:
    """The first delivery of each delayed message. A later one is late because the first failed."""
    return deliveries.where("attempt = 1 and lateness_seconds is not null")


def later_than(deliveries: DataFrame, target_seconds: float, *by: str) -> DataFrame:
    """Number and share of messages that were first delivered later than a target."""
    is_late = F.col("lateness_seconds") > target_seconds
    return (
        _first(deliveries)
        .groupBy(*by)
        .agg(F.count("*").alias("messages"), F.count_if(is_late).alias("late"))
        .withColumn("late_share", _share("late", "messages"))
    )


def _share(part: str, whole: str) -> Column:
    return F.when(F.col(whole) > 0, F.col(part) / F.col(whole))


def throughput(events: DataFrame, *by: str) -> DataFrame:
    """Number of events of each kind in each hour."""
    counts = [F.count_if(F.col("event") == name).alias(name) for name in EVENTS]
    return events.groupBy(part_of(F.col("at"), HOUR_SECONDS).alias("hour"), *by).agg(*counts)


def rates(deliveries: DataFrame, *by: str) -> DataFrame:
    """Rates of redelivered messages and of dead letters.

    `redelivered_rate` is a share of all deliveries, `dead_rate` of all messages.
    """
    return (
        deliveries.groupBy(*by)
        .agg(
            F.count("*").alias("deliveries"),
            F.count_if(F.col("attempt") == 1).alias("messages"),
            F.count_if(F.col("attempt") > 1).alias("redelivered"),
            F.count_if(F.col("ended") == "buried").alias("dead"),
        )
        .withColumn("redelivered_rate", _share("redelivered", "deliveries"))
        .withColumn("dead_rate", _share("dead", "messages"))
    )


def per_worker(deliveries: DataFrame, *by: str) -> DataFrame:
    """Deliveries of each worker, and the seconds for which it held them."""
    return deliveries.groupBy(*by, "worker").agg(
        F.count("*").alias("deliveries"),
        F.coalesce(F.sum("run_seconds"), F.lit(0.0)).alias("run_seconds"),
        F.percentile_approx("lateness_seconds", 0.95, _ACCURACY).alias("p95_seconds"),
    )


def evenness(deliveries: DataFrame, *by: str) -> DataFrame:
    """How evenly deliveries were distributed over workers.

    If all got the same number, `max_over_min` is 1 and `gini` is 0. `gini` nears 1 if one got all.
    """
    counts = deliveries.groupBy(*by, "worker").agg(F.count("*").alias("n"))
    rank = F.row_number().over(Window.partitionBy(F.lit(0), *by).orderBy("n"))
    total, workers = F.sum("n"), F.count("*")
    gini = 2 * F.sum(F.col("n") * F.col("rank")) / (workers * total) - (workers + 1) / workers
    return (
        counts.withColumn("rank", rank)
        .groupBy(*by)
        .agg(
            workers.alias("workers"),
            total.alias("deliveries"),
            F.max("n").alias("most"),
            F.min("n").alias("least"),
            (F.max("n") / F.min("n")).alias("max_over_min"),
            gini.alias("gini"),
        )
    )


def worst(deliveries: DataFrame, count: int = 100) -> DataFrame:
    """The messages that were first delivered latest, the worst first."""
    return _first(deliveries).orderBy(F.desc("lateness_seconds"), "queue", "id").limit(count)


def never_delivered(events: DataFrame, as_of: datetime | None = None) -> DataFrame:
    """Messages that were due by `as_of`, or by the last event, and still wait.

    They wait for a worker or for a limit. An `as_of` without a time zone is in UTC.
    Messages that were cancelled, and those whose scheduling is not among the events, do not count.
    """
    now = events.agg(F.max("at").alias("as_of"))
    if as_of is not None:
        now = now.select(instant(as_of).alias("as_of"))
    facts, order = F.struct("event", "task", "tenant", "due"), F.struct(*event_order())
    scheduled = F.when(F.col("event").isin(*_DUES), F.col("at"))
    last = (
        of_last_due(events)
        .groupBy(*_MESSAGE)
        .agg(F.max_by(facts, order).alias("last"), F.max(scheduled).alias("scheduled_at"))
    )
    waits = F.col("event").isin(*_DUES, "waiting") & F.col("scheduled_at").isNotNull()
    return (
        last.select(*_MESSAGE, "last.*", "scheduled_at")
        .crossJoin(F.broadcast(now))
        .where(waits & (F.col("due") <= F.col("as_of")))
        .select(
            *(*_MESSAGE, "task", "tenant", "due", "scheduled_at"),
            _seconds("due", "as_of").alias("overdue_seconds"),
        )
    )


def histogram(deliveries: DataFrame) -> DataFrame:
    """Number of messages by lateness, in steps that begin at `at_least_seconds`."""
    edges = F.filter(
        F.array(*map(F.lit, EDGES_SECONDS)), lambda edge: edge <= F.col("lateness_seconds")
    )
    bucket = F.coalesce(F.array_max(edges), F.lit(0.0)).alias("at_least_seconds")
    return _first(deliveries).groupBy(bucket).agg(F.count("*").alias("messages"))


# Over time, in intervals that fit the whole span.


def part_seconds(seconds: float) -> int:
    """The length of the intervals for a span of this many seconds."""
    fitting = (each for each in PARTS_SECONDS if seconds / each <= MOST_PARTS)
    return next(fitting, PARTS_SECONDS[-1])


def span_seconds(deliveries: DataFrame) -> float:
    """The seconds from the first due time or delivery to the last one."""
    first = F.min(F.least("delivered_at", F.coalesce("due", "delivered_at")))
    last = F.max(F.greatest("delivered_at", F.coalesce("due", "delivered_at")))
    [(begin, end)] = deliveries.agg(F.unix_millis(first), F.unix_millis(last)).collect()
    return (end - begin) / 1000.0 if begin is not None else 0.0


def part_of(time: Column, seconds: int) -> Column:
    """The start of the interval that has a time, in any session's time zone."""
    return F.timestamp_seconds(F.floor(F.unix_seconds(time) / seconds) * seconds)


def lateness_over_time(deliveries: DataFrame, seconds: int) -> DataFrame:
    """The lateness of messages that were due in each interval."""
    parts = deliveries.withColumn("part", part_of(F.col("due"), seconds))
    return lateness(parts, "part")


def deliveries_over_time(deliveries: DataFrame, seconds: int) -> DataFrame:
    """Deliveries in each interval, and how many of them ended in a dead letter."""
    parts = deliveries.groupBy(part_of(F.col("delivered_at"), seconds).alias("part"))
    dead = F.count_if(F.col("ended") == "buried").alias("dead")
    return parts.agg(F.count("*").alias("delivered"), dead)


def run_times(deliveries: DataFrame, *by: str) -> DataFrame:
    """Run times in seconds, p50, p95, p99 and the longest, of deliveries that were acknowledged."""
    ran = deliveries.where("run_seconds is not null")
    return _spread(ran, "run_seconds", "runs", "run_", *by)


def bulk_jobs(events: DataFrame) -> DataFrame:
    """Messages that each job scheduled, moved and cancelled in each queue, and when."""
    kinds = ("scheduled", "rescheduled", "cancelled")
    counts = [F.count_if(F.col("event") == name).alias(name) for name in kinds]
    return (
        events.where("job != ''")
        .groupBy("job", "queue")
        .agg(*counts, F.min("at").alias("first_at"), F.max("at").alias("last_at"))
    )
