"""What is delayed in an app's broker: look it up, cancel it, move it, count it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from itertools import chain, compress
from math import inf
from time import monotonic
from typing import Any

from celery import Celery

from kombu_delayed.inspection import events as streams
from kombu_delayed.inspection.backlog import Move
from kombu_delayed.inspection.copies import Copies
from kombu_delayed.inspection.events import Event
from kombu_delayed.inspection.lookup import lookup_by_id, lookup_by_reading
from kombu_delayed.store.queue_metrics import Metrics, fold
from kombu_delayed.store.shards import queue_of
from kombu_delayed.store.store import CALL_LIMIT

from ..app import signals
from ..app.queues import Queues
from ..errors import QueryError
from ..tasks.progress import Progress
from ..tasks.query import Query
from ..tasks.results import keeps_results
from ..tasks.task_info import TaskInfo
from ..tasks.times import LATEST_MS, from_ms, from_now_ms, to_ms
from .answers.expectations import Expectations
from .backup.transfer import BackupReport, FilePath, RestoreReport, backup, restore
from .bulk.schedule import BulkReport, schedule_many
from .change import Change, change
from .counts import Bucket, ConsumerInfo, Counts, Forecast
from .dead_letters import Dead
from .limits import LimitInfo, limits, stand
from .reschedule_plan import Plan

#: How often an app's tasks are looked at for result backends.
LOOK_SECONDS = 1.0

#: So many of the tasks that a bulk change has met are in its outcome.
SAMPLE_SIZE = 10


@dataclass
class Outcome:
    """What a bulk change has done, or with `dry_run` would do."""

    matched: int = 0
    changed: int = 0
    dry_run: bool = False
    queues: dict[str, int] = field(default_factory=dict)
    sample: list[TaskInfo] = field(default_factory=list)

    def add(self, queue: str, matched: list[TaskInfo], changed: int) -> None:
        self.matched += len(matched)
        self.changed += changed
        self.queues[queue] = self.queues.get(queue, 0) + len(matched)
        self.sample += matched[: SAMPLE_SIZE - len(self.sample)]


class Delayed(Queues):
    """The delayed tasks of an app's broker. No worker needs to run.

    Connects when it is used first. Raises BrokerError where the broker keeps no backlog, and
    Kombu's OperationalError where it cannot be reached; the next call tries again.
    """

    def __init__(self, app: Celery) -> None:
        super().__init__(app)
        #: What comes to a worker later than this after its ETA is told of in `task_late`.
        self.late_seconds: float = 60
        self._keeps_results = False
        self._look_again_at = -inf

    # One task.

    def get(
        self, task_id: str, queue: str | None = None, *, progress: Progress | None = None
    ) -> TaskInfo | None:
        """What is known of a task that is delayed, dead, ready or unacked, in this order.

        None: the broker does not have it. What is ready or unacked is found by reading all of it;
        `progress` is called with the number of messages that were read.
        """
        store = self.store
        nearest = store.shards.nearest
        names = [name for each in self._names(queue) for name in nearest(each, task_id)]
        by_id = (found for name in names for found in lookup_by_id(store, name, task_id))
        by_reading = (
            found
            for name in names
            for found in lookup_by_reading(store, name, task_id, progress or (lambda count: None))
        )
        return next((TaskInfo.of(found) for found in chain(by_id, by_reading)), None)

    def cancel(self, task_id: str, queue: str | None = None) -> bool:
        """Drop a delayed task; True if it was delayed and is gone now.

        Its result is REVOKED. Without `queue`, the app's queues are looked at, and those that it
        does not know only where it is in none of them.
        """
        return bool(self._cancel([task_id], queue))

    def cancel_ids(self, task_ids: Iterable[str], queue: str | None = None) -> set[str]:
        """Drop several tasks as `cancel` does; returns the ids of those that were delayed."""
        return self._cancel([*dict.fromkeys(task_ids)], queue)

    def _cancel(self, wanted: list[str], queue: str | None) -> set[str]:
        gone: set[str] = set()
        for shards in self.where(queue, wanted, gone):
            copies = Copies(self.store, shards)
            if not self._is_told_of_cancelling():
                gone.update(compress(wanted, copies.cancel(wanted)))
                continue
            for shard, waiting in copies.take(wanted):
                gone.add(waiting.id)
                self.was_cancelled(TaskInfo.waiting(shard, waiting))
        return gone

    def drop(self, shard: str, infos: Sequence[TaskInfo]) -> list[TaskInfo]:
        """Drop delayed tasks of one shard, send their signals, and return those that were there."""
        counts = self.backlog(shard).cancel([info.member for info in infos], members=True)
        dropped = list(compress(infos, counts))
        for info in dropped:
            self.was_cancelled(info)
        return dropped

    def _is_told_of_cancelling(self) -> bool:
        """Whether anybody is; the app's tasks, which may be many, are looked at once a second."""
        if signals.task_cancelled.receivers:
            return True
        if monotonic() >= self._look_again_at:
            self._keeps_results = keeps_results(self.app)
            self._look_again_at = monotonic() + LOOK_SECONDS
        return self._keeps_results

    def reschedule(
        self,
        task_id: str,
        *,
        countdown: float | None = None,
        eta: datetime | str | None = None,
        queue: str | None = None,
    ) -> bool:
        """Give a delayed task another due time, `countdown` seconds from now or `eta`.

        True if it was delayed. A time that has come lets it run now. Raises QueryError, which is a
        ValueError, where not exactly one of the two is given or it is no time.
        """
        if (countdown is None) == (eta is None):
            raise QueryError("reschedule takes either countdown (seconds) or eta (a time)")
        if eta is not None:
            return self._move(task_id, _move_to(to_ms("eta", eta)), queue)
        return self._move(task_id, _move_to(from_now_ms("countdown", countdown or 0)), queue)

    def run_now(self, task_id: str, queue: str | None = None) -> bool:
        """Let a delayed task run now; True if it was delayed."""
        return self._move(task_id, ("+0", ""), queue)

    def change(
        self,
        task_id: str,
        *,
        queue: str | None = None,
        accepts: Callable[[TaskInfo], bool] = lambda info: True,
        **to: Any,
    ) -> bool:
        """Give a delayed task another `priority`, other `args`, `kwargs` or `headers`, a due time.

        The latter is `countdown` or `eta` as for `reschedule`. True if it was delayed and `accepts`
        is true of it: a change is made of what that has seen, or not at all. Raises QueryError,
        which is a ValueError, where it cannot be meant or its arguments cannot be read here.
        """
        return change(self, task_id, Change(**to), queue, accepts)

    def _move(self, task_id: str, to: tuple[str, str], queue: str | None) -> bool:
        moved: set[str] = set()
        for shards in self.where(queue, [task_id], moved):
            if Copies(self.store, shards).reschedule([Move(task_id, *to)])[0]:
                moved.add(task_id)
        if moved:
            signals.task_rescheduled.send(sender=self.app, task_id=task_id, eta=to[1] or None)
        return bool(moved)

    # Many.

    def find(self, **criteria: Any) -> Iterator[TaskInfo]:
        """Delayed tasks that meet the criteria of `Query`, by queue and due time, read lazily."""
        return self.find_all(Query(**criteria))

    def find_all(self, query: Query) -> Iterator[TaskInfo]:
        """Delayed tasks that a query means, as `find`."""
        for _, page in self._pages(query):
            yield from page

    def _pages(self, query: Query) -> Iterator[tuple[str, list[TaskInfo]]]:
        """Those that are meant, in pages of one queue; an empty one tells of progress."""
        for queue in self.shards(query.queue):
            pages = self.backlog(queue).pages(query.due_after_ms, query.due_before_ms, query.needle)
            for page in pages:
                infos = (TaskInfo.waiting(queue, waiting) for waiting in page)
                yield queue, [info for info in infos if query.matches(info)]

    def cancel_many(
        self, query: Query, *, dry_run: bool = False, progress: Progress | None = None
    ) -> Outcome:
        """Drop all delayed tasks that a query means. Their results are REVOKED."""

        def cancel(queue: str, infos: list[TaskInfo]) -> int:
            return len(self.drop(queue, infos))

        return self._change(query, cancel, dry_run, progress)

    def run_now_many(
        self, query: Query, *, dry_run: bool = False, progress: Progress | None = None
    ) -> Outcome:
        """Let all delayed tasks that a query means run now."""

        def run(queue: str, infos: list[TaskInfo]) -> int:
            return self.move_all(queue, infos, [("+0", "")] * len(infos))

        return self._change(query, run, dry_run, progress)

    def reschedule_many(
        self,
        query: Query,
        *,
        by: timedelta | None = None,
        to: datetime | str | None = None,
        spread: timedelta | None = None,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> Outcome:
        """Give all delayed tasks that a query means another due time.

        `by` moves each by so much, `to` all to one time, `spread` evenly over so long a time from
        `to` (or now) on, in the order of queues and due times. Raises QueryError, which is a
        ValueError, where these do not fit together.
        """
        if (by is None) == (to is None and spread is None):
            raise QueryError("reschedule_many takes either by, or to and spread or one of them")
        for name, length in (("by", by), ("spread", spread)):
            if length is not None and not isinstance(length, timedelta):
                raise QueryError(f"{name}={length!r} is not a length of time: give a timedelta")
        start_ms = from_now_ms("to", 0) if to is None else to_ms("to", to)
        count = self.count(query) if spread is not None else 0
        plan = Plan(by, start_ms, spread, count)

        def move(queue: str, infos: list[TaskInfo]) -> int:
            return self.move_all(queue, infos, [_move_to(plan.next_ms(info)) for info in infos])

        return self._change(query, move, dry_run, progress, plan.was_moved)

    def count(self, query: Query) -> int:
        """How many delayed tasks a query means."""
        return sum(len(page) for _, page in self._pages(query))

    def move_all(self, queue: str, infos: list[TaskInfo], to: list[tuple[str, str]]) -> int:
        """Give tasks of one shard other due times, each as (due, eta) of a `Move`."""
        moves = [Move(info.member, *each) for info, each in zip(infos, to, strict=True)]
        counts = self.backlog(queue).reschedule(moves, members=True)
        for info, move, count in zip(infos, moves, counts, strict=True):
            if count:
                signals.task_rescheduled.send(
                    sender=self.app, task_id=info.id, eta=move.eta or None
                )
        return sum(counts)

    def _change(
        self,
        query: Query,
        change: Callable[[str, list[TaskInfo]], int],
        dry_run: bool,
        progress: Progress | None,
        is_done: Callable[[TaskInfo], bool] = lambda info: False,
    ) -> Outcome:
        outcome = Outcome(dry_run=dry_run)
        for queue, page in self._pages(query):
            infos = [info for info in page if not is_done(info)]
            for at in range(0, len(infos), CALL_LIMIT):
                part = infos[at : at + CALL_LIMIT]
                outcome.add(queue_of(queue), part, 0 if dry_run else change(queue, part))
            if progress is not None:
                progress(len(infos))
        return outcome

    def schedule_many(
        self, rows: Iterable[Any], batch: int = 1000, progress: bool | Progress | None = True
    ) -> BulkReport:
        """Send many tasks in few calls: see `bulk.schedule.schedule_many`."""
        return schedule_many(self, rows, batch=batch, progress=progress)

    def backup(
        self, path: FilePath, queue: str | None = None, progress: bool | Progress | None = None
    ) -> BackupReport:
        """Write what is delayed and what is dead to a file: see `control.backup.backup`."""
        return backup(self, path, queue, progress)

    def restore(
        self, path: FilePath, queue: str | None = None, progress: bool | Progress | None = None
    ) -> RestoreReport:
        """Put back what a file has, once: see `control.backup.restore`."""
        return restore(self, path, queue, progress)

    # The whole.

    def counts(self, queue: str | None = None) -> dict[str, Counts]:
        """How many messages each queue has in each state."""
        store = self.store
        shards = store.shards
        return {name: Counts.of(store, shards.all(name)) for name in self._names(queue)}

    def metrics(self, queue: str | None = None) -> dict[str, Metrics]:
        """What an autoscaler needs to know of each queue: one cheap call for each of its shards."""
        return {name: fold(shards) for name, shards in self.metrics_by_shard(queue).items()}

    def metrics_by_shard(self, queue: str | None = None) -> dict[str, list[Metrics]]:
        """As `metrics`, of each shard of each queue, by the shard's number."""
        store = self.store
        return {n: [*map(store.metrics, store.shards.all(n))] for n in self._names(queue)}

    def forecast(
        self,
        hours: float = 24,
        buckets: int = 48,
        queue: str | None = None,
        start: datetime | None = None,
    ) -> Forecast:
        """How many tasks are due in each of `buckets` parts of the coming `hours`.

        Counted from the partition index, so that no message is read.
        """
        start = datetime.now(timezone.utc) if start is None else start
        try:
            if not (hours > 0 and 0 < buckets < CALL_LIMIT):
                raise ValueError
            step = timedelta(hours=hours) / buckets
            edges = [to_ms("start", start + step * n) for n in range(buckets + 1)]
        except (OverflowError, TypeError, ValueError) as error:
            raise QueryError(
                f"a forecast takes a number of hours, 1 to {CALL_LIMIT - 1} buckets and a "
                f"datetime to start from, not {hours!r}, {buckets!r} and {start!r}"
            ) from error
        totals = [0] * (buckets + 2)
        for name in self.shards(queue):
            found = self.backlog(name).forecast(edges)
            totals = [a + b for a, b in zip(totals, found, strict=True)]
        overdue, *middle, later = totals
        parts = [Bucket(start + step * n, step, count) for n, count in enumerate(middle)]
        return Forecast(parts, overdue, later)

    def consumers(self, queue: str | None = None) -> list[ConsumerInfo]:
        """Who consumes, how long the lease lasts and how much is held."""
        names, store = self._names(queue), self.store
        return [
            info for name in names for info in ConsumerInfo.all_of(store, store.shards.all(name))
        ]

    def events(
        self,
        queue: str | None = None,
        *,
        task_id: str | None = None,
        after: Mapping[str, str] | None = None,
    ) -> Iterator[Event]:
        """What has happened to messages, as far as it is kept, queue by queue, the oldest first.

        `after` has the stream id of the last event that is known of each `Event.stream`.
        """
        for name in self.shards(queue):
            for page in streams.pages(self.store, name, (after or {}).get(name, "-")):
                yield from (each for each in page if task_id in (None, each.id))

    def limits(self, queue: str | None = None) -> list[LimitInfo]:
        """The limits of each queue: how much there is, how much is in use, how much waits for it.

        Of what waits some lanes a call are read, and 200,000 at the most.
        """
        return [info for name in self._names(queue) for info in limits(self, stand(self, name))]

    @property
    def dead(self) -> Dead:
        """The dead letters of all queues."""
        return Dead(self)

    @property
    def expectations(self) -> Expectations:
        """The answers that are expected, and those that came early."""
        return Expectations(self)


def _move_to(due_ms: int) -> tuple[str, str]:
    """The due time for the broker, and for the header of the task."""
    due_ms = min(max(due_ms, 0), LATEST_MS)
    return str(due_ms), from_ms(due_ms).isoformat()
