"""The job `simulate`: estimates lateness, and the servers and workers needed, at any size.

Spark simulates windows of the load in parallel, each message by message, and adds up the results.
The numbers depend only on the parameters, not on how Spark divides the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from kombu_delayed.errors import DelayedError, OptionError
from kombu_delayed.message.envelope import eta_to_ms

from .load import MOST_SLICES, Slice, Window, arriving, run, sample, slices_of, waits, windows_of
from .model import MOST_MESSAGES, Arrivals, Fleet
from .queue import Tally
from .result import Found, Result, mark, result
from .timeline import Point, busiest_rate, timeline

#: The most messages that are simulated by default; of more, a sample is.
MOST_SIMULATED = 10_000_000

#: Messages in a task of Spark, which are simulated within a second.
MOST_IN_TASK = 250_000

LEAST_TASKS = 8

_WINDOWS = (
    "number int, group int, wait_seconds double, warm_up int, "
    "slices array<struct<number: long, at: double, span_seconds: double, messages: long>>"
)

_FOUND = (
    "begin_seconds double, messages long, p50_seconds double, p99_seconds double, "
    "max_seconds double, redelivered long, lost long, busy_ms long, classes map<int, long>"
)


class NothingToSimulate(DelayedError):
    """There is no message to simulate."""


@dataclass(frozen=True)
class Simulation:
    """A result, its course over time, and the simulated windows."""

    result: Result
    course: list[Point]
    windows: DataFrame

    def write(self, out: str) -> None:
        """Write all results as Parquet tables to the directory `out`, replacing its content."""
        spark = self.windows.sparkSession
        tables = {
            "result": _frame(spark, [asdict(self.result)]),
            "course": _frame(spark, [point._asdict() for point in self.course]),
            "windows": self.windows.drop("classes").coalesce(1).sortWithinPartitions("number"),
        }
        for name, table in tables.items():
            table.coalesce(1).write.mode("overwrite").parquet(f"{out}/{name}")


def _frame(spark: SparkSession, rows: Sequence[dict[str, Any]]) -> DataFrame:
    names = {str: "string", int: "long", float: "double", type(None): "double"}
    schema = ", ".join(f"{name} {names[type(value)]}" for name, value in rows[0].items())
    return spark.createDataFrame([tuple(row.values()) for row in rows], schema)


def simulate(
    spark: SparkSession,
    fleet: Fleet,
    load: Arrivals | DataFrame,
    *,
    start: datetime | None = None,
    most_messages: int = MOST_SIMULATED,
) -> Simulation:
    """Simulate a load: numbers, or a DataFrame with the column due.

    For a DataFrame, time 0 is `start` (in UTC if it has no time zone), by default the first due
    time; earlier messages count as due then. If there are more than `most_messages`, a sample of
    the windows is simulated. Raises OptionError and NothingToSimulate.
    """
    if most_messages < 1:
        raise OptionError(f"most_messages is a whole number above 0, not {most_messages!r}")
    arrivals = load if isinstance(load, Arrivals) else None
    counts = arriving(arrivals, fleet) if arrivals else counts_of(load, start)
    slices = slices_of(counts)
    if not slices:
        raise NothingToSimulate("nothing falls due: there is no message to simulate")
    wait = waits(slices, fleet)
    windows = windows_of(slices, wait, fleet)
    chosen = sample(windows, most_messages, fleet)
    done = simulated(spark, chosen, fleet).persist()
    points = timeline(slices, wait, fleet, arrivals)
    busiest = busiest_rate(slices, wait, fleet)
    figures = result(windows, chosen, *gathered(done), points, busiest, fleet)
    return Simulation(figures, points, done)


def counts_of(frame: DataFrame, start: datetime | None = None) -> list[tuple[float, float, int]]:
    """How many messages are due from when to when, in seconds after `start`, for each second.

    Takes the column due. A long time is cut into parts of more than a second.
    """
    seconds = frame.where("due is not null").select(F.unix_millis("due").alias("ms"))
    by_second = _grouped(seconds, 1000, "ms", "ms", F.count("*")).persist()
    try:
        bounds = F.min("first"), F.max("last"), F.sum("n")
        ((first, last, total),) = by_second.agg(*bounds).collect()
        if total is None:
            return []
        if total > MOST_MESSAGES:
            raise OptionError(f"at most {MOST_MESSAGES:,} messages can be simulated, not {total:,}")
        begin = first if start is None else eta_to_ms(start)
        length = max((last - begin) // MOST_SLICES // 1000 + 1, 1) * 1000
        rows = _grouped(by_second, length, "first", "last", F.sum("n")).orderBy("first").collect()
    finally:
        by_second.unpersist()
    found = [(row["first"] - begin, row["last"] - begin, row["n"]) for row in rows]
    return [(max(early, 0) / 1000, max(late, 0) / 1000, int(n)) for early, late, n in found]


def _grouped(frame: DataFrame, length_ms: int, first: str, last: str, count: Any) -> DataFrame:
    return frame.groupBy((F.col(first) / length_ms).cast("long").alias("part")).agg(
        F.min(first).alias("first"), F.max(last).alias("last"), count.alias("n")
    )


def simulated(spark: SparkSession, windows: Sequence[Window], fleet: Fleet) -> DataFrame:
    rows = [(w.number, w.group, w.wait_seconds, w.warm_up, list(w.slices)) for w in windows]

    def work(
        number: int, group: int, wait_seconds: float, warm_up: int, slices: list[Any]
    ) -> tuple[Any, ...]:
        parts = tuple(Slice(*each) for each in slices)
        window = Window(number, wait_seconds, warm_up, parts, group)
        return _row(window, run(window, fleet))

    # Otherwise Spark may call it once for each column of its result.
    found = F.udf(work, _FOUND, useArrow=False).asNondeterministic()
    messages = sum(window.messages for window in windows)
    tasks = min(max(-(-messages // MOST_IN_TASK), LEAST_TASKS), len(rows))
    given = spark.createDataFrame(rows, _WINDOWS).repartition(tasks)
    columns = ("number", "group", "wait_seconds", "warm_up", "slices")
    return given.select("number", "group", "wait_seconds", found(*columns).alias("f")).select(
        "number", "group", "wait_seconds", "f.*"
    )


def _row(window: Window, tally: Tally) -> tuple[Any, ...]:
    classes = {number: messages for number, messages in enumerate(tally.classes) if messages}
    return (
        window.counted[0].at,
        window.messages,
        mark(classes, 0.5),
        mark(classes, 0.99),
        tally.most_seconds,
        tally.redelivered,
        tally.lost,
        round(tally.busy_seconds * 1000),
        classes,
    )


def gathered(windows: DataFrame) -> tuple[dict[int, Found], dict[int, dict[int, int]]]:
    """The results of each group's windows, and their messages by classes of lateness.

    Sums are of whole numbers, so their order does not matter.
    """
    sums = windows.groupBy("group").agg(
        *(F.sum(name).alias(name) for name in ("messages", "redelivered", "lost", "busy_ms")),
        F.max("max_seconds").alias("max_seconds"),
    )
    found = {
        row["group"]: Found(
            row["messages"],
            row["redelivered"],
            row["lost"],
            row["busy_ms"] / 1000,
            row["max_seconds"],
        )
        for row in sums.collect()
    }
    classes: dict[int, dict[int, int]] = {group: {} for group in found}
    counts = windows.select("group", F.explode("classes").alias("class", "n"))
    for row in counts.groupBy("group", "class").agg(F.sum("n").alias("n")).collect():
        classes[row["group"]][row["class"]] = row["n"]
    return found, classes
