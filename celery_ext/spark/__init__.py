"""The backlog as a Spark DataFrame, and DataFrames into the backlog.

Nothing here imports pyspark before it is used.
"""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from kombu_delayed.errors import OptionError
from kombu_delayed.store.ledgers import CANCEL, RESCHEDULE, SCHEDULE, Job

from .connect import connected
from .options import (
    BrokerOptions,
    ReadOptions,
    WriteOptions,
    as_texts,
)
from .sink.registry import JobReport, JobState, end, forget, listed, may_be_done, read_report

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import DataFrame, SparkSession

__all__ = [
    "JobReport",
    "JobState",
    "backlog",
    "cancel",
    "forget_job",
    "job_report",
    "jobs",
    "reschedule",
    "schedule",
    "session",
]

logger = logging.getLogger(__name__)

FORMAT = "kombu_delayed"


def session(**conf: Any) -> SparkSession:
    """The active Spark session, or a new one on this machine (`celery_ext.spark.commands.java`)."""
    from .commands.java import session

    return session(**conf)


def backlog(spark: SparkSession, *, columns: Sequence[str] = (), **options: Any) -> DataFrame:
    """The delayed messages of a broker. Fetches only these `columns`, by default all.

    Each message is included at most once. `options` are those of `ReadOptions`. Raises OptionError.
    """
    from .source.columns import COLUMNS, check_columns

    ReadOptions.parse(options)
    names = (columns,) if isinstance(columns, str) else tuple(columns or COLUMNS)
    if len(set(names)) < len(names):
        raise OptionError(f"a column is named twice in {', '.join(names)}")
    check_columns({name: COLUMNS[name].type if name in COLUMNS else "" for name in names})
    schema = ", ".join(f"{name} {COLUMNS[name].type}" for name in names)
    try:
        return spark.read.format(FORMAT).options(**as_texts(options)).schema(schema).load()
    except Exception as error:
        _check_found(error)
        raise


def schedule(df: DataFrame, **options: Any) -> JobReport:
    """Schedule a task for each row. `options` are those of `WriteOptions`. Returns the result.

    Raises OptionError, and Spark's error if tasks fail: run the same job_id again.
    """
    return run_job(df, SCHEDULE, options)


def cancel(df: DataFrame, **options: Any) -> JobReport:
    """Cancel the delayed messages whose ids and queues are in the rows. Raises like `schedule`."""
    return run_job(df, CANCEL, options)


def reschedule(df: DataFrame, **options: Any) -> JobReport:
    """Move the messages whose ids are in the rows to the time in column eta or countdown.

    A job moves each id once, even if the new times are computed from those in the backlog. Raises
    like `schedule`.
    """
    # Read all rows of the backlog before any of them moves, or some would be read twice.
    context = _context(df.sparkSession)
    is_kept = context is not None and context.getCheckpointDir()
    return run_job(df.checkpoint() if is_kept else df.localCheckpoint(), RESCHEDULE, options)


def run_job(df: DataFrame, operation: str, options: dict[str, Any]) -> JobReport:
    """Apply an operation of `WriteOptions` to each row. Raises like `schedule`."""
    _adopt(df.sparkSession)
    options = {**options, "operation": operation}
    given = WriteOptions.parse(options)
    texts = as_texts({**options, "job_id": given.job_id})
    logger.info("Job %s begins: %s", given.job_id, operation)
    try:
        with _stopping(df.sparkSession):
            if "://" in given.rejects:
                from .sink.hadoop_rejects import write_rejecting

                write_rejecting(df, given)
            else:
                df.write.format(FORMAT).options(**texts).mode("append").save()
    except KeyboardInterrupt:  # Spark may not call the job's writer
        with suppress(Exception), connected(given) as delayed:
            end(delayed.store, Job(given.job_id, "", given.ledger_seconds, operation), None)
        raise
    except Exception as error:
        if not may_be_done(error):
            raise
        _check_found(error)
        _note_job(error, given.job_id)
        raise
    with connected(given, waits=True) as delayed:
        return read_report(delayed.store, given.job_id) or JobReport(given.job_id)


def _adopt(spark: Any) -> None:
    """Let any thread write, because Spark looks up this data source in the thread's session."""
    from pyspark.sql import SparkSession

    if isinstance(spark, SparkSession):  # not one of Spark Connect
        spark._jvm.SparkSession.setActiveSession(spark._jsparkSession)


@contextmanager
def _stopping(spark: Any) -> Iterator[None]:
    """Stop Spark's tasks at an interrupt. In a notebook, PySpark does not."""
    context = _context(spark)
    if context is None:
        yield
        return
    tag = f"kombu-delayed-{uuid4()}"
    context.addJobTag(tag)
    try:
        yield
    except KeyboardInterrupt:
        with suppress(Exception):
            context.cancelJobsWithTag(tag)
        raise
    finally:
        with suppress(Exception):  # Java may have ended
            context.removeJobTag(tag)


def _context(spark: Any) -> Any:
    """The SparkContext of a session. Spark Connect has none: it stops at an interrupt itself."""
    return getattr(spark, "sparkContext", None)


def _check_found(error: Exception) -> None:
    """Raises OptionError if Spark has not found this data source."""
    text = ""
    with suppress(Exception):  # Java, which knows the text, may have ended
        text = str(error)
    if "DATA_SOURCE_NOT_FOUND" in text:
        raise OptionError(
            "Spark's Python processes do not find kombu-delayed: set PYSPARK_PYTHON to "
            f"{sys.executable} before the session starts, or use celery_ext.spark.session(). "
            "If they have it, the process with which Spark looked for it was killed, and this "
            "session does not look again: start another session, or call "
            "spark.dataSource.register(celery_ext.spark.data_source.DefaultSource)"
        ) from error


def _note_job(error: Exception, job_id: str) -> None:
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(
            f"The finished rows of job {job_id!r} stay. Run it again with this job_id to continue"
        )


def job_report(job_id: str, **options: Any) -> JobReport | None:
    """The result of a job's last run. None: no run has ended, or the report has expired.

    `options` say where the broker is. Raises OptionError, and Kombu's OperationalError.
    """
    with connected(BrokerOptions.parse(options)) as delayed:
        return read_report(delayed.store, job_id)


def jobs(**options: Any) -> list[JobState]:
    """The jobs that wrote to a broker, the newest first, for as long as their ledgers are kept.

    A job whose driver was lost is "silent": run it again with its job_id to finish it. `options`
    say where the broker is. Raises OptionError, and Kombu's OperationalError.
    """
    with connected(BrokerOptions.parse(options)) as delayed:
        return listed(delayed.store)


def forget_job(job_id: str, *, force: bool = False, **options: Any) -> int:
    """Drop the ledger of a job that has ended. If the job runs again, it repeats its rows.

    Returns the number of deleted hashes. Raises JobRuns if the job is running, unless you pass
    `force`, and like `jobs`.
    """
    with connected(BrokerOptions.parse(options)) as delayed:
        return forget(delayed.store, job_id, force=force)
