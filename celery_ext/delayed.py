"""What is delayed in an app's broker: look it up, cancel it, move it, count it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from celery import Celery
from kombu import Connection

from kombu_delayed import backlog as backlogs
from kombu_delayed.backlog import Backlog, Move
from kombu_delayed.lookup import lookup_by_id, lookup_by_reading
from kombu_delayed.message import eta_to_ms
from kombu_delayed.store import CALL_LIMIT, Store
from kombu_delayed.transport import Transport

from . import signals
from .counts import Bucket, ConsumerInfo, Counts, Forecast
from .dead import Dead
from .errors import BrokerError, QueryError
from .query import Query
from .revoked import store_revoked
from .task_info import TaskInfo

Progress = Callable[[int], None]

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
        """Count a page of one queue."""
        self.matched += len(matched)
        self.changed += changed
        self.queues[queue] = self.queues.get(queue, 0) + len(matched)
        self.sample += matched[: SAMPLE_SIZE - len(self.sample)]


class Delayed:
    """The delayed tasks of an app's broker. No worker needs to run.

    Connects when it is used first. Raises BrokerError where the broker keeps no backlog, and
    Kombu's connection errors where it cannot be reached.
    """

    def __init__(self, app: Celery) -> None:
        self.app = app
        self._connection: Connection | None = None

    @property
    def connection(self) -> Connection:
        """The connection that all calls share."""
        if self._connection is None:
            connection = self.app.connection_for_write()
            if not isinstance(connection.transport, Transport):
                raise BrokerError(
                    f"the app's broker {connection.as_uri()} keeps no backlog: put delayed+ in "
                    "front of its URL"
                )
            self._connection = connection
        return self._connection

    @property
    def store(self) -> Store:
        """The moves of the broker's messages."""
        store: Store = self.connection.default_channel.store
        return store

    def close(self) -> None:
        """Disconnect; the next call connects again."""
        if self._connection is not None:
            self._connection.release()
            self._connection = None

    def queues(self) -> list[str]:
        """The app's queues, and all in the broker that have something delayed, dead or running."""
        return sorted({*self.app.amqp.queues, *backlogs.queues(self.store)})

    def backlog(self, queue: str) -> Backlog:
        """The backlog of one queue."""
        return Backlog(self.store, queue)

    # One task.

    def get(self, task_id: str, queue: str | None = None) -> TaskInfo | None:
        """What is known of a task that is delayed, dead, unacked or ready, in this order.

        None: the broker does not have it. What is ready or unacked is found by reading all of it.
        """
        names = [queue] if queue else self.queues()
        for look in (lookup_by_id, lookup_by_reading):
            for name in names:
                for found in look(self.store, name, task_id):
                    return TaskInfo.of(found)
        return None

    def cancel(self, task_id: str, queue: str | None = None) -> bool:
        """Drop a delayed task; True if it was delayed and is gone now.

        Its result is REVOKED. Without `queue`, the app's queues are looked at first.
        """
        dropped = self._in_queues(queue, lambda name: self._cancel_in(name, task_id))
        return dropped > 0

    def _cancel_in(self, queue: str, task_id: str) -> int:
        dropped = self.backlog(queue).take(task_id)
        for waiting in dropped:
            self._was_cancelled(TaskInfo.waiting(queue, waiting))
        return len(dropped)

    def _was_cancelled(self, info: TaskInfo) -> None:
        store_revoked(self.app, info)
        signals.task_cancelled.send(sender=self.app, info=info)

    def reschedule(
        self,
        task_id: str,
        *,
        countdown: float | None = None,
        eta: datetime | str | None = None,
        queue: str | None = None,
    ) -> bool:
        """Give a delayed task another due time, `countdown` seconds from now or `eta`.

        True if it was delayed. A time that has come lets it run now. Raises ValueError where not
        exactly one of the two is given.
        """
        if (countdown is None) == (eta is None):
            raise ValueError("reschedule takes either countdown (seconds) or eta (a time)")
        if countdown is not None:
            eta = datetime.now(timezone.utc) + timedelta(seconds=countdown)
        return self._move(task_id, _move_to(eta_to_ms(eta or "")), queue)

    def run_now(self, task_id: str, queue: str | None = None) -> bool:
        """Let a delayed task run now; True if it was delayed."""
        return self._move(task_id, ("+0", ""), queue)

    def _move(self, task_id: str, to: tuple[str, str], queue: str | None) -> bool:
        def move(name: str) -> int:
            return self.backlog(name).reschedule([Move(task_id, *to)])[0]

        moved = self._in_queues(queue, move) > 0
        if moved:
            signals.task_rescheduled.send(sender=self.app, task_id=task_id, eta=to[1] or None)
        return moved

    def _in_queues(self, queue: str | None, change: Callable[[str], int]) -> int:
        """How many were changed in a queue, or in the app's, or else in those that there are."""
        if queue:
            return change(queue)
        own = list(self.app.amqp.queues)
        changed = sum(map(change, own))
        return changed or sum(change(name) for name in self.queues() if name not in own)

    # Many.

    def find(self, **criteria: Any) -> Iterator[TaskInfo]:
        """Delayed tasks that meet the criteria of `Query`, by queue and due time, read lazily."""
        query = Query(**criteria)
        for _, page in self._pages(query):
            yield from page

    def _pages(self, query: Query) -> Iterator[tuple[str, list[TaskInfo]]]:
        """Those that are meant, in pages of one queue; an empty one tells of progress."""
        for queue in [query.queue] if query.queue else self.queues():
            pages = self.backlog(queue).pages(query.due_after_ms, query.due_before_ms, query.needle)
            for page in pages:
                infos = (TaskInfo.waiting(queue, waiting) for waiting in page)
                yield queue, [info for info in infos if query.matches(info)]

    def cancel_many(
        self, query: Query, *, dry_run: bool = False, progress: Progress | None = None
    ) -> Outcome:
        """Drop all delayed tasks that a query means. Their results are REVOKED."""

        def cancel(queue: str, infos: list[TaskInfo]) -> int:
            dropped = self.backlog(queue).cancel([info.member for info in infos], members=True)
            for info, count in zip(infos, dropped, strict=True):
                if count:
                    self._was_cancelled(info)
            return sum(dropped)

        return self._change(query, cancel, dry_run, progress)

    def run_now_many(
        self, query: Query, *, dry_run: bool = False, progress: Progress | None = None
    ) -> Outcome:
        """Let all delayed tasks that a query means run now."""

        def run(queue: str, infos: list[TaskInfo]) -> int:
            return self._move_all(queue, infos, [("+0", "")] * len(infos))

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
        `to` (or now) on, in their order. Raises ValueError where these do not fit together.
        """
        if (by is None) == (to is None and spread is None):
            raise ValueError("reschedule_many takes either by, or to and spread or one of them")
        count = self.count(query) if spread is not None else 0
        start_ms = eta_to_ms(datetime.now(timezone.utc) if to is None else to)
        plan = _Plan(by, start_ms, spread, count)

        def move(queue: str, infos: list[TaskInfo]) -> int:
            return self._move_all(queue, infos, [_move_to(plan.due_ms(info)) for info in infos])

        return self._change(query, move, dry_run, progress)

    def count(self, query: Query) -> int:
        """How many delayed tasks a query means."""
        return sum(len(page) for _, page in self._pages(query))

    def _move_all(self, queue: str, infos: list[TaskInfo], to: list[tuple[str, str]]) -> int:
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
    ) -> Outcome:
        outcome = Outcome(dry_run=dry_run)
        moved: set[tuple[str, str]] = set()
        for queue, page in self._pages(query):
            # What was moved ahead is met again there.
            infos = [info for info in page if (queue, info.member) not in moved]
            for at in range(0, len(infos), CALL_LIMIT):
                part = infos[at : at + CALL_LIMIT]
                outcome.add(queue, part, 0 if dry_run else change(queue, part))
            if not dry_run:
                moved.difference_update((queue, info.member) for info in page)
                moved.update((queue, info.member) for info in infos)
            if progress is not None:
                progress(len(infos))
        return outcome

    # The whole.

    def counts(self, queue: str | None = None) -> dict[str, Counts]:
        """How many messages each queue has in each state."""
        store = self.store
        return {name: Counts.of(store, name) for name in ([queue] if queue else self.queues())}

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
        if not (hours > 0 and 0 < buckets < CALL_LIMIT):
            raise QueryError(
                f"a forecast takes some hours and 1 to {CALL_LIMIT - 1} buckets, not "
                f"{hours!r} and {buckets!r}"
            )
        start = start or datetime.now(timezone.utc)
        step = timedelta(hours=hours) / buckets
        edges = [eta_to_ms(start + step * n) for n in range(buckets + 1)]
        totals = [0] * (buckets + 2)
        for name in [queue] if queue else self.queues():
            found = self.backlog(name).forecast(edges)
            totals = [a + b for a, b in zip(totals, found, strict=True)]
        overdue, *middle, later = totals
        parts = [Bucket(start + step * n, step, count) for n, count in enumerate(middle)]
        return Forecast(parts, overdue, later)

    def consumers(self, queue: str | None = None) -> list[ConsumerInfo]:
        """Who consumes, how long the lease lasts and how much is held."""
        names: Iterable[str] = [queue] if queue else self.queues()
        return [info for name in names for info in ConsumerInfo.all_of(self.store, name)]

    @property
    def dead(self) -> Dead:
        """The dead letters of all queues."""
        return Dead(self.connection, self.queues)


@dataclass
class _Plan:
    """Where a bulk reschedule moves the next one."""

    by: timedelta | None
    start_ms: int
    spread: timedelta | None
    count: int
    seen: int = 0

    def due_ms(self, info: TaskInfo) -> int:
        if self.by is not None:
            return (info.due_ms or 0) + round(self.by.total_seconds() * 1000)
        if self.spread is None:
            return self.start_ms
        share = min(self.seen / max(self.count, 1), 1)
        self.seen += 1
        return self.start_ms + round(self.spread.total_seconds() * 1000 * share)


def _move_to(due_ms: int) -> tuple[str, str]:
    """The due time for the broker, and for the header of the task."""
    moment = datetime.fromtimestamp(0, timezone.utc) + timedelta(milliseconds=max(due_ms, 0))
    return str(max(due_ms, 0)), moment.isoformat()
