"""Writes a DataFrame to a broker: schedules, restores, cancels or reschedules each row once."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any
from uuid import uuid4

import pyarrow
from kombu.exceptions import OperationalError
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from celery_ext import Delayed
from celery_ext.control.bulk.schedule import schedule_many
from kombu_delayed.connection.commands import numbers
from kombu_delayed.errors import DelayedError, OptionError
from kombu_delayed.inspection.restore_placement import by_shard, with_noted
from kombu_delayed.store.calls.scripts import Call, whole
from kombu_delayed.store.calls.shards import is_shard, queue_of
from kombu_delayed.store.ledgers import (
    CANCEL,
    RESTORE,
    SCHEDULE,
    Job,
    LedgerStore,
    answered,
    done_by_run,
)
from kombu_delayed.store.store import CALL_LIMIT, Store, chunks
from kombu_delayed.transport.batch import BATCH_BYTES, Pipeline

from ..connect import connected
from ..options import DROP, WriteOptions
from .backup_rows import BackupRows, check_backup
from .fitting import COLUMNS, check_columns, extra_columns
from .pace import Pace, jitter_seconds
from .registry import JobReport, Progress, begin, end, keep_report
from .rejects import Rejects, discard, publish
from .rows import Rows

#: Not Kombu's logger, which is silent unless logging is set up, as in Spark's processes.
logger = logging.getLogger(__name__)


class RowsLost(DelayedError):
    """The broker has lost rows that a job has written."""


@dataclass
class Written(WriterCommitMessage):
    """The result of one task.

    `changed` are messages by shard, `rows` those not refused. Under the name `attempt`, the broker
    counts its answers, one for each id in a shard: `answered` are those that the task received.
    """

    rows: int = 0
    answered: int = 0
    refused: int = 0
    undecodable: int = 0
    changed: dict[str, int] = field(default_factory=dict)
    rejects: str = ""
    attempt: str = ""


class BacklogWriter(DataSourceArrowWriter):
    """One write of a DataFrame: made on the driver, copied to each attempt at each task."""

    def __init__(self, options: WriteOptions, schema: StructType, job: Job | None = None) -> None:
        check = check_backup if options.operation == RESTORE else check_columns
        check({each.name: each.dataType.simpleString() for each in schema.fields}, options)
        self.options = options
        self.dropped = dropped_columns(schema.names, options)
        self._began = monotonic()
        #: The network's jitter, for all tasks: they cannot measure it while others write.
        self.jitter_seconds = 0.0
        #: Batches of a stream are not listed, because Spark's own interface shows them.
        self.is_listed = job is None
        self.job = job or Job(
            options.job_id, uuid4().hex, options.ledger_seconds, options.operation
        )
        with connected(options, waits=True) as delayed:
            _ = delayed.store  # an unusable broker fails here, not in each task
        if "://" in options.rejects:
            raise OptionError(
                f"option rejects={options.rejects!r} is written by Spark itself: call schedule, "
                "cancel, reschedule or restore of celery_ext.spark with the DataFrame, instead of "
                "df.write or df.writeStream (in a stream within foreachBatch)"
            )
        if options.rejects:
            os.makedirs(options.rejects, exist_ok=True)

    def begin(self) -> None:
        """On the driver, before the first row: list the job."""
        with connected(self.options) as delayed:
            begin(delayed.store, self.job, self.options.label, self.options.total_rows)
            if self.options.latency_budget_ms:
                self.jitter_seconds = jitter_seconds(delayed.store)

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> Written:
        """Process the rows of a task. Raises RowsRefused, and OperationalError (BulkError)."""
        rejects = Rejects(self.options, self._attempt())
        attempt = uuid4().hex
        try:
            with connected(self.options) as delayed:
                store = LedgerStore(delayed.store, self.job, attempt)
                written = self._work(delayed, store, iterator, rejects)
        finally:
            rejects.close()
        written.refused, written.rejects = rejects.count, rejects.name
        written.attempt = attempt
        return written

    def _attempt(self) -> str:
        context = TaskContext.get()
        if context is None:
            return f"{self.job.run}-0-0"
        return f"{self.job.run}-{context.partitionId():05d}-{context.taskAttemptId()}"

    def _work(
        self,
        delayed: Delayed,
        store: LedgerStore,
        batches: Iterator[pyarrow.RecordBatch],
        rejects: Rejects,
    ) -> Written:
        progress = Progress(delayed.store, self.job) if self.is_listed else None
        pace = Pace(
            delayed.store,
            self.options,
            self.job,
            on_written=progress.add if progress else None,
            jitter_seconds=self.jitter_seconds,
        )
        if self.options.operation == RESTORE:
            saved = BackupRows(batches, self.options, rejects.add)
            written = self._change(store, saved, pace)
            written.undecodable = saved.undecodable
        else:
            queue = delayed.app.conf.task_default_queue
            rows = Rows(batches, self.options, queue, rejects.add)
            if self.options.operation == SCHEDULE:
                written = self._schedule(delayed, store, rows, rejects, pace)
            else:
                written = self._change(store, rows, pace)
        if progress:
            progress.report()
        return written

    def _schedule(
        self, delayed: Delayed, store: LedgerStore, rows: Rows, rejects: Rejects, pace: Pace
    ) -> Written:
        report = schedule_many(
            delayed,
            pace.over(rows),
            batch=pace.batch,
            store=store,
            on_refused=lambda refused: rejects.add(rows.current, refused.reason),
        )
        changed = dict.fromkeys(store.queues, 0)
        count = report.accepted + report.already
        return Written(count, count, changed=changed)

    def _change(self, store: LedgerStore, rows: Iterable[tuple[Any, ...]], pace: Pace) -> Written:
        written = Written()
        is_restore = self.options.operation == RESTORE

        def count(shard: str, answer: bytes) -> None:
            counts = numbers(answer)
            if is_restore:  # how many are there now, and how many were before
                written.rows += sum(counts)
                written.answered += sum(counts)
                counts = counts[:1]
            else:
                written.answered += len(counts)
                if not is_shard(shard):  # each is searched in all shards
                    written.rows += len(counts)
            written.changed[shard] = written.changed.get(shard, 0) + sum(counts)

        pipeline = Pipeline(store, count)
        try:
            # One by one: a server does all calls that it has read before it turns to others.
            for commands in self._commands(store, pace.over(rows), min(pace.batch, CALL_LIMIT)):
                pipeline.confirm()
                pipeline.send(commands)
            pipeline.confirm()
        finally:
            pipeline.close()
        return written

    def _commands(
        self,
        store: LedgerStore,
        rows: Iterable[tuple[Any, ...]],
        size: int,
    ) -> Iterator[list[tuple[str, tuple[Any, ...]]]]:
        """The script calls for a batch of rows, by queue."""
        for batch in batches(rows, size):
            by_queue: dict[str, list[tuple[Any, ...]]] = {}
            for queue, *what in batch:
                by_queue.setdefault(queue, []).append(tuple(what))
            yield [
                (shard, whole(*self._call(store, shard, part)))
                for queue, each in by_queue.items()
                for shard, items in self._by_shard(store, queue, each)
                for part in chunks(items)
            ]

    def _by_shard(
        self, store: LedgerStore, queue: str, items: list[tuple[Any, ...]]
    ) -> Iterator[tuple[str, list[tuple[Any, ...]]]]:
        """Group restored rows by their shard. A changed row may be in any shard."""
        if self.options.operation != RESTORE:
            yield from ((shard, items) for shard in store.shards.all(queue))
            return
        for shard, part, there in by_shard(store, queue, items):
            yield shard, with_noted(part, there)

    def _call(self, store: LedgerStore, queue: str, part: Any) -> Call:
        if self.options.operation == CANCEL:
            return store.cancel_call(queue, [id for id, _, _ in part])
        if self.options.operation == RESTORE:
            return store.restore_call(queue, part)
        return store.reschedule_call(queue, part)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """On the driver, when all tasks are done: count, and publish refused rows."""
        written = [each for each in messages if isinstance(each, Written)]
        with connected(self.options, waits=True) as delayed:
            report = self._report(delayed.store, written)
            self._check_kept(delayed.store, written)
            if self.options.rejects:
                names = [each.rejects for each in written if each.rejects]
                publish(self.options.rejects, names, self.job.run)
            keep_report(delayed.store, self.job, report)
            if self.is_listed:
                end(delayed.store, self.job, report)
        if report.dropped:
            logger.info("Job %s: columns left out: %s", report.job_id, ", ".join(report.dropped))
        logger.info(
            "Job %s: %d accepted, %d already done, %d refused",
            report.job_id,
            report.accepted,
            report.already,
            report.refused,
        )

    def _report(self, store: Store, written: list[Written]) -> JobReport:
        """The report of the run, including rows of failed attempts, which the ledger has."""
        shards: dict[str, int] = {}
        for each in written:
            for shard, count in each.changed.items():
                shards[shard] = shards.get(shard, 0) + count
        if self.options.operation != CANCEL:
            shards = {shard: done_by_run(store, self.job, shard) for shard in shards}
        queues: dict[str, int] = {}
        for shard, count in sorted(shards.items()):
            queues[queue_of(shard)] = queues.get(queue_of(shard), 0) + count
        accepted = sum(queues.values())
        already = max(0, sum(each.rows for each in written) - accepted)
        refused = sum(each.refused for each in written)
        undecodable = sum(each.undecodable for each in written)
        counts = accepted, already, refused
        return JobReport(self.job.id, *counts, queues, self.dropped, undecodable)

    def _check_kept(self, store: Store, written: list[Written]) -> None:
        """Raises RowsLost if the broker has counted fewer answers than the tasks have received.

        Then it may have lost those rows, too. This can also happen if a job takes longer than its
        ledgers are kept.
        """
        if self.options.operation == CANCEL or monotonic() - self._began >= self.job.seconds:
            return
        attempts: dict[str, list[str]] = {}
        for each in written:
            for shard in each.changed:
                attempts.setdefault(shard, []).append(each.attempt)
        known = sum(answered(store, self.job, *each) for each in attempts.items())
        answers = sum(each.answered for each in written)
        if known < answers:
            rows = sum(each.rows for each in written)
            lost = -(-(answers - known) * rows // answers)  # several shards may answer a row
            raise RowsLost(
                f"the broker may have lost {lost:,} of the {rows:,} rows that "
                f"job {self.job.id} wrote: it was started without its latest data, or a failover "
                "lost them. Run the job again with the same job_id to write them again"
            )

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """On the driver, when the write has failed: processed rows stay, and are not repeated."""
        if self.options.rejects:
            discard(self.options.rejects, self.job.run)
        if self.is_listed:
            with suppress(OperationalError), connected(self.options, waits=True) as delayed:
                end(delayed.store, self.job, None)
        logger.error(
            "Job %s has failed after some of its rows: run it again with job_id=%r, and these "
            "rows are skipped",
            self.job.id,
            self.job.id,
        )


def dropped_columns(names: Sequence[str], options: WriteOptions) -> list[str]:
    """The columns of a DataFrame that are left out."""
    if options.operation == RESTORE or options.extra_columns != DROP:
        return []
    return extra_columns(names, (*COLUMNS[options.operation], *options.key_columns))


def batches(rows: Iterable[tuple[Any, ...]], size: int) -> Iterator[list[tuple[Any, ...]]]:
    """Lists of `size` rows, or of fewer whose texts reach `BATCH_BYTES`."""
    batch: list[tuple[Any, ...]] = []
    found = 0
    for row in rows:
        batch.append(row)
        found += sum(map(len, row))
        if len(batch) == size or found >= BATCH_BYTES:
            yield batch
            batch, found = [], 0
    if batch:
        yield batch
