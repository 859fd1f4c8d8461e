"""The list of a broker's jobs, with their progress and reports; a job can be forgotten."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from time import monotonic
from typing import Any

from celery_ext.tasks.times import from_ms
from kombu_delayed.errors import DelayedError, OptionError, ServerFull
from kombu_delayed.inspection.backlog import queues_with
from kombu_delayed.store.calls.scripts import script
from kombu_delayed.store.keys import job_pace, job_report, job_shards, job_state, jobs
from kombu_delayed.store.ledgers import CANCEL, OPERATIONS, Job, drop_ledger
from kombu_delayed.store.store import Store

from ..options import KEYS

#: The most jobs in the list. Older jobs can be run again, too.
JOBS = 1_000

#: A running job without a report for this long has lost its driver, or waits for its rows.
SILENT_SECONDS = 60

#: How often writers report their progress.
REPORT_SECONDS = 1.0

RUNNING, SILENT, ENDED, FAILED = "running", "silent", "ended", "failed"

_LABEL_LENGTH = 300

#: The counts of a job that are stored.
_COUNTS = ("accepted", "already", "refused")
_TEXTS = ("id", "operation", "label", "state")
_NUMBERS = ("begun_ms", "heard_ms", "kept_seconds", "rows", *_COUNTS, "total_rows")


class JobRuns(DelayedError, ValueError):
    """The job is running: without its ledger it would repeat its work."""


@dataclass
class JobReport:
    """The result of writing a DataFrame.

    `accepted` counts the rows that this run scheduled, restored, cancelled or moved. `already`
    counts rows with nothing to do: they are done, exist already, or are no longer delayed.
    `dropped` are the columns that were left out. `undecodable` counts rows of a restore or a copy
    whose messages no program can read: their queue has lost the dictionary.
    """

    job_id: str
    accepted: int = 0
    already: int = 0
    refused: int = 0
    queues: dict[str, int] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    undecodable: int = 0


@dataclass(frozen=True)
class JobState:
    """The state of a job at its last report (`heard_at`).

    `state` is "running", "silent" (running, but without a report for a minute), "ended" or
    "failed". `rows` is the number of rows that this run has processed; those of Spark tasks that
    ran again count twice. `accepted`, `already` and `refused` are None until it has ended.
    `total_rows` is None if the option was not set.
    """

    job_id: str
    operation: str
    label: str
    state: str
    begun_at: datetime
    heard_at: datetime
    rows: int
    accepted: int | None = None
    already: int | None = None
    refused: int | None = None
    total_rows: int | None = None

    @property
    def percent(self) -> float | None:
        """The progress of this run, from 0 to 100; None: unknown."""
        return min(self.rows / self.total_rows, 1.0) * 100 if self.total_rows else None

    @property
    def rows_per_second(self) -> float:
        seconds = (self.heard_at - self.begun_at).total_seconds()
        return self.rows / seconds if seconds > 0 else 0.0


def begin(store: Store, job: Job, label: str, total_rows: int = 0) -> None:
    """Add a job to the list, before its first row is written."""
    prefix = store.keys("").prefix
    fields = {"state": RUNNING, "label": label[:_LABEL_LENGTH]}
    if total_rows:
        fields["total_rows"] = str(total_rows)
    _note(store, job, fields, begins=1)
    try:
        _list(store, job)
    except ServerFull:
        _note(store, job, {"state": FAILED, "ended": job.run})
        raise
    store.run("ZREMRANGEBYRANK", jobs(prefix), 0, -JOBS - 1)


def _list(store: Store, job: Job) -> None:
    """Add a job to the list. A cancel job runs without it on a full server, which it empties."""
    key = jobs(store.keys("").prefix)
    try:
        store.run("ZADD", key, round(time.time() * 1000), job.ledger)
    except ServerFull:
        if job.operation != CANCEL:
            raise


def end(store: Store, job: Job, report: JobReport | None) -> None:
    """Store the report of a job's run, or None if it failed. Without a name: of all its runs."""
    fields = {"state": FAILED, "ended": job.run}
    if report is not None:
        counts = {name: str(getattr(report, name)) for name in _COUNTS}
        fields |= {"state": ENDED, **counts}
    _note(store, job, fields)
    _list(store, job)  # again, in case the server has lost its data


def _note(
    store: Store,
    job: Job,
    fields: Mapping[str, str],
    *,
    begins: int = 0,
    run: str = "",
    rows: int = 0,
) -> None:
    what = {"id": job.id, "operation": job.operation, **fields}
    script("note_job")(
        store.run,
        state=job_state(job.ledger, store.keys("").prefix),
        now=store.now,
        begins=begins,
        run=run,
        rows=rows,
        kept_seconds=job.seconds,
        fields=[text for pair in what.items() for text in pair],
    )


class Progress:
    """Reports the progress of one Spark task, at most once per second."""

    def __init__(self, store: Store, job: Job, clock: Callable[[], float] = monotonic) -> None:
        self._store, self._job, self._clock = store, job, clock
        self._rows, self._reported_at = 0, clock()

    def add(self, rows: int) -> None:
        self._rows += rows
        if self._clock() - self._reported_at >= REPORT_SECONDS:
            self.report()

    def report(self) -> None:
        """Report the rows since the last report."""
        if self._rows:
            _note(self._store, self._job, {"state": RUNNING}, run=self._job.run, rows=self._rows)
        self._rows, self._reported_at = 0, self._clock()


def may_be_done(error: BaseException) -> bool:
    """Whether a write may have written rows before it raised this error."""
    from pyspark.errors import AnalysisException

    # Spark raises AnalysisException for errors of a data source at the start and at the end.
    is_analysis = isinstance(error, AnalysisException) and "Failed to commit" not in str(error)
    return not is_analysis and not isinstance(error, OptionError)


def keep_report(store: Store, job: Job, report: JobReport) -> None:
    """Store a run's report where `read_report` finds it, in any process."""
    key = job_report(job.id, store.keys("").prefix)
    # Older versions refuse a report with an unknown field, so these are stored only if needed.
    seldom = ("dropped", "undecodable")
    facts = {name: value for name, value in asdict(report).items() if value or name not in seldom}
    script("keep_report")(store.run, report=key, text=json.dumps(facts), seconds=job.seconds)


def _check_name(job_id: str) -> None:
    if job_id.endswith(KEYS):
        raise OptionError(f"job_id={job_id!r} is not a job: it is the name of a key of one")


def read_report(store: Store, job_id: str) -> JobReport | None:
    """The report of a job's last run; None if there is none, or it is forgotten."""
    _check_name(job_id)
    found = store.run("GET", job_report(job_id, store.keys("").prefix))
    return JobReport(**json.loads(found)) if found else None


def listed(store: Store, count: int = JOBS) -> list[JobState]:
    """The latest jobs, newest first, as long as their ledgers are kept."""
    key = jobs(store.keys("").prefix)
    found = []
    for name in store.run("ZREVRANGE", key, 0, count - 1):
        if state := _read(store, name.decode()):
            found.append(state)
        else:
            store.run("ZREM", key, name)
    return found


def _read(store: Store, ledger: str) -> JobState | None:
    key = job_state(ledger, store.keys("").prefix)
    found = store.run("HMGET", key, *_TEXTS, *_NUMBERS)
    texts: list[Any] = [text if text is None else text.decode(errors="replace") for text in found]
    numbers: list[Any] = [text and int(text) for text in texts[len(_TEXTS) :]]
    job_id, operation, label, state = texts[: len(_TEXTS)]
    begun_ms, heard_ms, kept_seconds, rows, *counts = numbers
    if state is None or begun_ms is None:
        return None
    silent_ms = kept_seconds * 1000 - store.run("PTTL", key)
    if state == RUNNING and silent_ms > SILENT_SECONDS * 1000:
        state = SILENT
    times = from_ms(begun_ms), from_ms(heard_ms)
    return JobState(job_id, operation, label or "", state, *times, rows, *counts)


def forget(store: Store, job_id: str, *, force: bool = False) -> int:
    """Delete a job's ledger, in short calls; returns the number of deleted hashes.

    Raises JobRuns if it is running, unless `force` is set.
    """
    _check_name(job_id)
    prefix = store.keys("").prefix
    names = [Job(job_id, "", 0, operation).ledger for operation in OPERATIONS]
    for name in names:
        found = _read(store, name)
        if found and found.state == RUNNING and not force:
            raise JobRuns(
                f"job {job_id!r} is running; its last report was at {found.heard_at:%X} UTC"
            )
    queues = queues_with(store, "ledgers-until")
    count = sum(drop_ledger(store, queue, name) for queue in queues for name in names)
    store.run("DEL", job_report(job_id, prefix))
    for name in names:
        count += sum(store.run("DEL", key(name, prefix)) for key in (job_state, job_shards))
        store.run("DEL", job_pace(name, prefix))
        store.run("ZREM", jobs(prefix), name)
    return count
