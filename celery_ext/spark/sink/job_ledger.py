"""The report of a job's run, which is kept for later readers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from kombu_delayed.errors import OptionError
from kombu_delayed.store.calls.scripts import script
from kombu_delayed.store.keys import job_report
from kombu_delayed.store.ledgers import Job
from kombu_delayed.store.store import Store


@dataclass
class JobReport:
    """The result of writing a DataFrame.

    `accepted` counts the rows that this run scheduled, restored, cancelled or moved. `already`
    counts rows with nothing to do: they are done, exist already, or are no longer delayed.
    `dropped` are the columns that were left out.
    """

    job_id: str
    accepted: int = 0
    already: int = 0
    refused: int = 0
    queues: dict[str, int] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)


def may_be_done(error: BaseException) -> bool:
    """Whether a write may have written rows before it raised this error."""
    from pyspark.errors import AnalysisException

    # Spark raises AnalysisException for errors of a data source at the start and at the end.
    is_analysis = isinstance(error, AnalysisException) and "Failed to commit" not in str(error)
    return not is_analysis and not isinstance(error, OptionError)


def keep_report(store: Store, job: Job, report: JobReport) -> None:
    """Store a run's report where `read_report` finds it, in any process."""
    key = job_report(job.id, store.keys("").prefix)
    told = {name: value for name, value in asdict(report).items() if value or name != "dropped"}
    script("keep_report")(store.run, report=key, text=json.dumps(told), seconds=job.seconds)


def read_report(store: Store, job_id: str) -> JobReport | None:
    """The report of a job's last run; None if there is none, or it is forgotten."""
    found = store.run("GET", job_report(job_id, store.keys("").prefix))
    return JobReport(**json.loads(found)) if found else None
