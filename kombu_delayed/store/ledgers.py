"""Records what a job has done with each id, so that a repeated row takes effect once.

Spark repeats a failed task and runs a slow task twice at the same time; a restore is repeated after
an interruption; and by then the message may have run and be gone. The script call that schedules
also writes the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from .calls.caller import chunks
from .calls.scripts import Call
from .calls.shards import QueueShards, Shards
from .keys import job_shards
from .store import Store

SCHEDULE, CANCEL, RESCHEDULE, RESTORE = "schedule", "cancel", "reschedule", "restore"
OPERATIONS = (SCHEDULE, CANCEL, RESCHEDULE, RESTORE)

#: How many parts of a ledger one call drops, and how many parts there are.
DROPPED_TOGETHER, SLICES = 64, 4096

#: Fields of the ledger: how many ids are in its parts, since when it has parts, and how many
#: attempts it counts, each in its own field. No id begins like that.
IN_SLICES, SLICED, ATTEMPTS = "\x1fin-slices", "\x1fsliced", "\x1fattempts"

#: The scripts that write to a ledger, by operation.
ONCE = {SCHEDULE: "schedule_once", RESCHEDULE: "reschedule_once", RESTORE: "restore"}


@dataclass(frozen=True)
class Job:
    """A job and one run of it: all attempts of all tasks of one write.

    `seconds` is how long the ledger is kept. Another operation under the same id is another job, so
    that scheduled messages can be rescheduled.
    """

    id: str
    run: str
    seconds: int
    operation: str = SCHEDULE

    @property
    def ledger(self) -> str:
        """The name of the job's ledger, the same in each queue."""
        return self.id if self.operation == SCHEDULE else f"{self.id}:{self.operation}"

    @property
    def counter(self) -> str:
        """The ledger's field that counts what this run has done."""
        return _counter(self.run)


def _counter(name: str) -> str:
    """A counter field of the ledger; no id begins like that."""
    return f"\x1f{name}"


class JobShards(Shards):
    """Shards as of the job's start, because a ledger covers only the messages of its own shard."""

    def __init__(self, store: Store, job: Job) -> None:
        vars(self).update(vars(copy(store.shards)))
        self._job, self._store = job, store
        self._begun: dict[str, int] = {}

    def count(self, queue: str) -> int:
        """The number of shards, the same for each run of the job."""
        if queue not in self._begun:
            run, older = self._store.run, job_shards(self._job.ledger, self._store.keys("").prefix)
            count = int(run("HGET", older, queue) or super().count(queue))
            given = {"ledger_seconds": self._job.seconds, "count": count}
            self._begun[queue] = self._store.ask("spread", queue, self._job.ledger, **given)
        return self._begun[queue]

    #: Not another shard while a node is down: a repeated row must go to the same one.
    place = Shards.home


class JobQueueShards(JobShards, QueueShards):
    """`JobShards` for a Cluster, with its numbers where consumers look for them."""


class LedgerStore(Store):
    """A store that does each move once per job; `queues` collects the queues that it used.

    With a name for the `attempt`, the ids that the attempt deals with are counted.
    """

    def __init__(self, store: Store, job: Job, attempt: str = "") -> None:
        vars(self).update(vars(copy(store)))
        self.job = job
        self._attempt = attempt and _counter(attempt)
        if job.operation != CANCEL:  # it has no ledger, and also runs on a full server
            self.shards = (JobQueueShards if store.cluster else JobShards)(store, job)
        self.queues: set[str] = set()

    def call(self, name: str, queue: str, owner: str | None = None, /, **given: Any) -> Call:
        """`Store.call`, but scripts with a ledger skip the ids that the job has dealt with."""
        if name not in ONCE:
            return super().call(name, queue, owner, **given)
        self.queues.add(queue)
        given |= {"run": self.job.counter, "attempt": self._attempt}
        given["ledger_seconds"] = self.job.seconds
        return super().call(ONCE[name], queue, self.job.ledger, **given)

    def reschedule_call(self, queue: str, moves: Sequence[tuple[str, str, str]]) -> Call:
        """The script that moves (id, due, eta) for ids that the job has not dealt with before."""
        entries = [text for move in moves for text in move]
        return self.call("reschedule", queue, whole=1, entries=entries)

    def cancel_call(self, queue: str, ids: Sequence[str], how: str = "all") -> Call:
        """`Store.cancel_call`, without a ledger: a cancelled message is gone anyway."""
        self.queues.add(queue)
        return super().cancel_call(queue, ids, f"job:{self.job.id}" if how == "all" else how)


def done_by_run(store: Store, job: Job, queue: str) -> int:
    """How many messages a run has made or moved, including attempts that did not count."""
    return _sum(store, job, queue, [job.counter])


def answered(store: Store, job: Job, queue: str, attempts: Sequence[str]) -> int:
    """How many ids these attempts have dealt with, or found dealt with before.

    A server that has lost the writes of an attempt has lost this count too.
    """
    return sum(_sum(store, job, queue, part) for part in chunks([*map(_counter, attempts)]))


def _sum(store: Store, job: Job, queue: str, fields: Sequence[str]) -> int:
    counts = store.run("HMGET", store.keys(queue).job(job.ledger), *fields)
    return sum(int(count or 0) for count in counts)


def dealt_with(store: Store, job: Job, queue: str) -> int:
    """About how many ids a job has dealt with in all its runs."""
    key = store.keys(queue).job(job.ledger)
    in_slices, sliced, attempts = store.run("HMGET", key, IN_SLICES, SLICED, ATTEMPTS)
    count = int(store.run("HLEN", key)) + int(in_slices or 0)
    return count - (sliced is not None) - (0 if attempts is None else int(attempts) + 1)


def drop_ledger(store: Store, queue: str, ledger: str) -> int:
    """Drop a ledger in many short calls; returns how many hashes it had.

    Its main hash goes last, so that an interrupted call can be repeated.
    """
    keys = store.keys(queue)
    main = keys.job(ledger)
    if store.run("ZSCORE", keys.ledgers_until, main) is None:
        return 0
    is_sliced = store.run("HEXISTS", main, IN_SLICES)
    parts = [keys.job_slice(ledger, f"{n:03x}") for n in range(SLICES if is_sliced else 0)]
    count = 0
    for together in (*chunks(parts, DROPPED_TOGETHER), [main]):
        count += int(store.ask("drop_ledgers", queue, ledgers=[*together]))
    return count
