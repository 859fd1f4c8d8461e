"""What a job has done with which id: each row has its effect once, whoever runs it how often.

Spark runs a task again when it fails, and a slow one twice at a time; a message may have run and
gone before that. The ledger is written by the same script call that schedules.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import copy
from dataclasses import asdict, dataclass, field
from typing import Any

from kombu_delayed.store.keys import job_report, job_shards
from kombu_delayed.store.scripts import Script, script
from kombu_delayed.store.shards import Shards
from kombu_delayed.store.store import Entry, Store

from ..options import SCHEDULE


@dataclass(frozen=True)
class Job:
    """A job, and one run of it: all attempts of all tasks of one write.

    `seconds` is how long the ledger is kept. What is done under the same id by another operation
    is another job: what was scheduled may be rescheduled.
    """

    id: str
    run: str
    seconds: int
    operation: str = SCHEDULE

    @property
    def ledger(self) -> str:
        """What the ledgers of a job are called, in each queue."""
        return self.id if self.operation == SCHEDULE else f"{self.id}:{self.operation}"

    @property
    def counter(self) -> str:
        """The ledger's field with what this run has done; no id begins like that."""
        return f"\x1f{self.run}"

    def ledger_of(self, store: Store, queue: str) -> dict[str, Any]:
        """The ledger of a queue, for scripts that write to it."""
        keys = store.keys(queue)
        return {
            "job": keys.job(self.ledger),
            "ledgers_until": keys.ledgers_until,
            "ledger_seconds": self.seconds,
        }


@dataclass
class JobReport:
    """What became of the rows of a DataFrame.

    `accepted` counts what this run has scheduled, restored, cancelled or moved, `already` rows that
    there was nothing to do for: dealt with before, there already or, to be changed, not delayed any
    more.
    """

    job_id: str
    accepted: int = 0
    already: int = 0
    refused: int = 0
    queues: dict[str, int] = field(default_factory=dict)


class JobShards(Shards):
    """Shards as they were when a job began: a ledger knows the messages of its own shard only."""

    def __init__(self, store: Store, job: Job) -> None:
        vars(self).update(vars(copy(store.shards)))
        self._job, self._store = job, store
        self._begun: dict[str, int] = {}

    def count(self, queue: str) -> int:
        """The same each time that the job is run."""
        if queue not in self._begun:
            run, older = self._store.run, job_shards(self._job.ledger, self._store.keys("").prefix)
            count = int(run("HGET", older, queue) or super().count(queue))
            ledger = self._job.ledger_of(self._store, queue)
            self._begun[queue] = script("spread")(run, **ledger, now=self._store.now, count=count)
        return self._begun[queue]


class LedgerStore(Store):
    """A store that does each thing once in a job; `queues` are those that it was done in."""

    def __init__(self, store: Store, job: Job) -> None:
        vars(self).update(vars(copy(store)))
        self.job = job
        self.shards = JobShards(store, job)
        self.queues: set[str] = set()

    def schedule_call(
        self, queue: str, entries: Sequence[Entry], expires_ms: int = 0
    ) -> tuple[Script, dict[str, Any]]:
        """As of any store, for what the job has not dealt with before."""
        _, given = super().schedule_call(queue, entries, expires_ms)
        return script("schedule_once"), {**given, **self._ledger(queue)}

    def reschedule_call(
        self, queue: str, moves: Sequence[tuple[str, str, str]]
    ) -> tuple[Script, dict[str, Any]]:
        """Moves, given as (id, due, eta), for ids that the job has not dealt with before."""
        keys = self.keys(queue)
        return script("reschedule_once"), {
            **keys.backlog,
            **self.event_keys(keys),
            **self._ledger(queue),
            "moved": keys.moved,
            "ready": keys.ready,
            "now": self.now,
            "partition_size": self.partition_size,
            "steps": keys.steps,
            "whole": 1,
            "entries": [text for move in moves for text in move],
        }

    def restore_call(
        self, queue: str, entries: Sequence[tuple[bytes, ...]]
    ) -> tuple[Script, dict[str, Any]]:
        """As of any store, for what the job has not dealt with before."""
        move, given = super().restore_call(queue, entries)
        return move, {**given, **self._ledger(queue)}

    def cancel_call(
        self, queue: str, ids: Sequence[str], how: str = "all"
    ) -> tuple[Script, dict[str, Any]]:
        """As of any store; that they are gone is ledger enough."""
        self.queues.add(queue)
        return super().cancel_call(queue, ids, how)

    def _ledger(self, queue: str) -> dict[str, Any]:
        self.queues.add(queue)
        return {**self.job.ledger_of(self, queue), "run": self.job.counter}


def done_by_run(store: Store, job: Job, queue: str) -> int:
    """How many messages a run has made or moved, also in attempts that did not count."""
    return int(store.run("HGET", store.keys(queue).job(job.ledger), job.counter) or 0)


def keep_report(store: Store, job: Job, report: JobReport) -> None:
    """Leave a run's report where `read_report` finds it, in whichever process."""
    key = job_report(job.id, store.keys("").prefix)
    store.run("SET", key, json.dumps(asdict(report)), "EX", job.seconds)


def read_report(store: Store, job_id: str) -> JobReport | None:
    """The report of a job's last run; None: it has none, or it is forgotten."""
    found = store.run("GET", job_report(job_id, store.keys("").prefix))
    return JobReport(**json.loads(found)) if found else None
