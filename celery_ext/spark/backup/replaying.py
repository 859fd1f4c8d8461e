"""Finds the messages that an outage missed in the archive of events, and schedules them again.

Events have the history of a message, but not the message itself, which is in a backup or among the
dead letters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from datetime import datetime, timedelta, timezone
from functools import reduce
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from kombu_delayed.errors import DelayedError, OptionError
from kombu_delayed.message.envelope import eta_to_ms
from kombu_delayed.store.ledgers import Job
from kombu_delayed.store.store import CALL_LIMIT

from ..connect import connected
from ..options import BrokerOptions, WriteOptions
from ..reports.queries import event_order, instant, of_last_due
from ..sink.backup_rows import COLUMNS, IS_THERE
from ..sink.pace import Pace
from ..sink.registry import JobReport
from .held import in_broker
from .transfer import restore

#: The state of a message after its last event. After any other event it has ended.
STATES = {
    "scheduled": "delayed",
    "rescheduled": "delayed",
    "waiting": "waiting",
    "released": "ready",
    "reclaimed": "ready",
    "replayed": "ready",
    "delivered": "unacked",
    "buried": "dead",
}

#: States in which no worker has started the task.
UNTOUCHED = ("delayed", "waiting", "ready")

_MESSAGE = ("queue", "id")

#: A column that tells several backups apart: 0 is the newest.
_AGE = "_age"

#: The options for the connection to the broker.
_BROKER = {each.name for each in fields(BrokerOptions)}

#: The reason for messages that cannot be restored.
NO_MESSAGE = "it is in no backup, and lifecycle events do not have the message"


class NoMessage(DelayedError, ValueError):
    """Missed messages are in no backup, and no directory for their ids was given."""


def missed(
    events: DataFrame,
    *,
    states: Sequence[str] = UNTOUCHED,
    since: datetime | None = None,
    until: datetime | None = None,
) -> DataFrame:
    """The messages that were due and did not finish, one row for each queue and id.

    `state` is the state after the last event: "delayed", "waiting", "ready", "unacked" or "dead";
    `at` is the time of that event. Only messages that were due from `since` on and before `until`
    are included; times without a zone are in UTC. Without `until`, the time of the last event is
    the end, because the archive has no later events. For messages that were never delayed, `at`
    counts as the due time.
    """
    order = F.struct(*event_order())
    facts = F.struct("event", "task", "tenant", "due", "at")
    state = F.create_map(*(F.lit(text) for pair in STATES.items() for text in pair))
    when = F.coalesce("due", "at")
    found = (
        of_last_due(events)
        .groupBy(*_MESSAGE)
        .agg(F.max_by(facts, order).alias("last"))
        .select(*_MESSAGE, "last.*")
        .withColumn("state", state[F.col("event")])
        .where(F.col("state").isin(*states))
    )
    if since is not None:
        found = found.where(when >= instant(since))
    if until is not None:
        found = found.where(when < instant(until))
    else:
        last = F.broadcast(events.agg(F.max("at").alias("_last")))
        found = found.crossJoin(last).where(when <= F.col("_last"))
    return found.select(*_MESSAGE, "task", "tenant", "due", "state", "at")


def newest_first(backups: Iterable[DataFrame]) -> DataFrame:
    """Several backups as one. A replay takes a message from the first of them that has it."""
    aged = [each.withColumn(_AGE, F.lit(n)) for n, each in enumerate(backups)]
    return reduce(DataFrame.unionByName, aged)


def with_messages(missed: DataFrame, backup: DataFrame) -> DataFrame:
    """The rows of a backup for missed messages, each once, with the due times of `missed`.

    If several messages share an id, all are included. `backup` may be several, `newest_first`.
    """
    if _AGE not in backup.columns:
        backup = backup.withColumn(_AGE, F.lit(0))
    due = F.coalesce("_due", F.timestamp_millis("due_ms"))
    newest = F.min(_AGE).over(Window.partitionBy(*_MESSAGE))
    wanted = missed.select(*_MESSAGE, F.col("due").alias("_due"))
    return (
        backup.join(wanted, [*_MESSAGE])
        .withColumn("_newest", newest)
        .where(F.col(_AGE) == F.col("_newest"))
        .dropDuplicates([*_MESSAGE, "member"])
        .withColumns({"due": due, "due_ms": F.unix_millis(due)})
        .select(*COLUMNS)
    )


def without_messages(missed: DataFrame, backup: DataFrame) -> DataFrame:
    """The missed messages that are in no backup."""
    return missed.join(_kept(missed, backup), [*_MESSAGE], "left_anti")


def _kept(missed: DataFrame, backup: DataFrame) -> DataFrame:
    # An inner join: Spark broadcasts the few missed messages instead of shuffling the backup.
    ids = missed.select(*_MESSAGE)
    return backup.select(*_MESSAGE).join(ids, [*_MESSAGE]).distinct()


def spread(rows: DataFrame, start: datetime, over: timedelta = timedelta(0)) -> DataFrame:
    """The rows of a backup with new due times, spread randomly and evenly over a span from `start`.

    A message gets the same time in each run. A `start` without a time zone is in UTC. Raises
    OptionError for a negative span.
    """
    if over < timedelta(0):
        raise OptionError(f"messages are spread over a length of time from 0 on, not {over}")
    due_ms = F.lit(eta_to_ms(start)).cast("bigint")
    if span_ms := round(over.total_seconds() * 1000):
        due_ms = due_ms + F.pmod(F.xxhash64(*_MESSAGE), F.lit(span_ms))
    return rows.withColumns({"due_ms": due_ms, "due": F.timestamp_millis(due_ms)})


def replay(
    missed: DataFrame,
    backup: DataFrame,
    *,
    at: datetime | None = None,
    over: timedelta = timedelta(0),
    **options: Any,
) -> JobReport:
    """Schedule missed messages again from a backup, each once per job.

    They get the due times of `missed`, and run at once if these have passed; or the time `at`; or
    times spread over a span that begins at `at` or now. Messages that are still waiting, ready or
    held by a worker stay as they are (`already`). Messages without a backup are written to the
    directory `rejects` (`refused`). `options` are those of `WriteOptions`. Raises NoMessage if
    there is no `rejects`, and like `restore`.
    """
    given = WriteOptions.parse(options)
    missed = missed.persist()
    known = missed.limit(0)
    broker = {name: each for name, each in options.items() if name in _BROKER}
    try:
        known = in_broker(missed, broker).persist()
        unknown = missed.join(known, [*_MESSAGE], "left_anti")
        lost = _give_up(without_messages(unknown, backup), missed.count(), given)
        rows = with_messages(missed, backup)
        if at is not None or over:
            rows = spread(rows, at or datetime.now(timezone.utc), over)
        # The job must record these, too: they may have run by the time it is run again.
        is_there = F.broadcast(known.withColumn(IS_THERE, F.lit(True)))
        report = restore(rows.join(is_there, [*_MESSAGE], "left"), **options)
        report.already += without_messages(known, backup).count()
        report.refused += lost
        return report
    finally:
        known.unpersist()
        missed.unpersist()


def _give_up(lost: DataFrame, total: int, options: WriteOptions) -> int:
    lost = lost.persist()
    try:
        count = lost.count()
        if count and not options.rejects:
            raise NoMessage(
                f"{count:,} of {total:,} messages that were missed are in no backup, and lifecycle "
                "events do not have the message: give another backup as well, or let the option "
                "rejects name a directory for their ids, and the others are replayed"
            )
        if count:
            made = lost.select(F.lit(NO_MESSAGE).alias("reason"), F.struct("*").alias("row"))
            where = options.rejects
            path = where if "://" in where else f"file://{Path(where).absolute()}"
            made.write.mode("append").json(path)
        return count
    finally:
        lost.unpersist()


def replay_dead(missed: DataFrame, *, at: datetime | None = None, **options: Any) -> JobReport:
    """Retry dead letters in place, now or at a time; this needs no backup.

    Letters that have failed again since an earlier run of the job are retried again. `already`
    counts those that are no dead letters any more. `options` are those of `WriteOptions`. Raises
    OptionError, and Kombu's OperationalError if the broker fails.
    """
    given = WriteOptions.parse(options)
    due_ms = 0 if at is None else eta_to_ms(at)
    report = JobReport(given.job_id)
    # In the driver: a queue keeps few dead letters, and a repeated Spark task would count wrongly.
    rows = missed.select(*_MESSAGE).orderBy("queue").toLocalIterator()
    with connected(given, waits=True) as delayed:
        job = Job(given.job_id, "", given.ledger_seconds, given.operation)
        pace = Pace(delayed.store, given, job)
        for queue, of_queue in groupby(rows, key=lambda row: row.queue):
            ids = (row.id for row in of_queue)
            while part := [*islice(ids, CALL_LIMIT)]:
                store = delayed.store
                count = sum(store.dead.replay(s, part, due_ms) for s in store.shards.all(queue))
                report.accepted += count
                report.already += len(part) - count
                report.queues[queue] = report.queues.get(queue, 0) + count
                pace.written(len(part))
    return report


def counted(missed: DataFrame, backup: DataFrame | None = None) -> DataFrame:
    """The number of missed messages by queue and state, and those `kept` in a backup."""
    is_kept = F.lit(False)
    if backup is not None:
        kept = _kept(missed, backup).withColumn("_kept", F.lit(True))
        missed, is_kept = missed.join(kept, [*_MESSAGE], "left"), F.col("_kept")
    found = missed.groupBy("queue", "state")
    return found.agg(F.count("*").alias("missed"), F.count_if(is_kept).alias("kept"))
