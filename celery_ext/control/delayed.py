"""Looks up, cancels, moves and counts the tasks that wait in an app's broker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any

from celery import Celery

from kombu_delayed.inspection import events as streams
from kombu_delayed.inspection.events import Event
from kombu_delayed.store.queue_metrics import Metrics, fold

from ..app.queues import Queues
from ..errors import QueryError
from ..tasks.history import TaskHistory
from ..tasks.progress import Progress
from ..tasks.query import Query, ids_of, query_of, selects_ready
from ..tasks.task_info import TaskInfo
from ..tasks.times import Length, from_now_ms, to_ms
from .answers.expectations import Expectations
from .backup.transfer import BackupReport, FilePath, RestoreReport, backup, restore
from .bulk.schedule import BulkReport, schedule_many
from .changes.change import Change, change
from .changes.change_many import DuePlan, Outcome, change_found, counts_by_shard, pages
from .changes.moves import NOW, Moves, due_at
from .changes.ready import matching
from .changes.redirect import Redirect
from .counts import ConsumerInfo, Counts, Forecast
from .dead_letters import Dead
from .outcomes import TaskFilter, history_of, look_up, recorded
from .policies.declared import Policies
from .policies.limits import LimitInfo, gate_usage, limits
from .policies.overrides import reset_limit, set_limit
from .policies.pauses import Part, QueuePause, pause, pauses, resume


class Delayed(Queues):
    """The delayed tasks of an app's broker. No worker needs to run.

    Connects on first use. Raises BrokerError if the broker does not use this transport, and
    Kombu's OperationalError if it cannot be reached; the next call tries again.
    """

    def __init__(self, app: Celery) -> None:
        super().__init__(app)
        #: `task_late` is sent for a task that a worker gets later than this after its ETA.
        self.late_seconds: float = 60
        #: Cancels and reschedules what was found in a shard.
        self.moves = Moves(self)

    # One task.

    def get(
        self, task_id: str, queue: str | None = None, *, progress: Progress | None = None
    ) -> TaskInfo | None:
        """A task in any state, or None if it is unknown.

        A delayed or dead task, and one that a worker has received, is found by its id at once.
        Without such a record, all ready and unacknowledged messages are scanned; `progress` is
        called with the number of messages that were read.
        """
        return look_up(self, task_id, queue, progress or (lambda count: None))

    def history(self, task_id: str, queue: str | None = None) -> TaskHistory | None:
        """The steps that workers recorded of a task, over all attempts, or None."""
        return history_of(self, task_id, queue)

    def recorded(
        self,
        of: str = "failed",
        queue: str | None = None,
        *,
        task: str | None = None,
        error: str | None = None,
        worker: str | None = None,
        longer_than: Length | None = None,
        shorter_than: Length | None = None,
    ) -> Iterator[TaskHistory]:
        """Tasks whose last outcome is `of`, the latest of each queue first, read lazily.

        `of` is "failed" (including tasks that timed out or were lost), "running", "retrying" or
        "slow". The last 2,000 of each queue are listed. `task`, `error` and `worker` are patterns
        with `*` and `?`; `error` matches the type, or type and text as in "ValueError: *".
        `longer_than` and `shorter_than` compare run times, for running tasks until now: seconds,
        text such as "90s", or a timedelta. Raises QueryError for another `of` and for an invalid
        length.
        """
        return recorded(self, of, queue, TaskFilter(task, error, worker, longer_than, shorter_than))

    def cancel(self, task_id: str, queue: str | None = None) -> bool:
        """Cancel a delayed or ready task. True if it was one.

        Its result becomes REVOKED. Without `queue`, the app's queues are searched first, then other
        queues of the broker. A ready task is found at once if this process has looked for one
        before; otherwise all ready messages are scanned.
        """
        return bool(self.cancel_ids([task_id], queue))

    def cancel_ids(self, task_ids: Iterable[str], queue: str | None = None) -> set[str]:
        """Cancel several tasks. Returns the ids of those that were delayed or ready."""
        return self.moves.cancel_by_id(ids_of(task_ids), queue)

    def reschedule(
        self,
        task_id: str,
        *,
        countdown: float | None = None,
        eta: datetime | str | None = None,
        queue: str | None = None,
    ) -> bool:
        """Move a delayed or ready task to `eta`, or to `countdown` seconds from now.

        True if it was one. With a time in the past it runs now. Raises QueryError, a ValueError,
        for an invalid time, and unless you pass exactly one of the two.
        """
        if (countdown is None) == (eta is None):
            raise QueryError("reschedule takes either countdown (seconds) or eta (a time)")
        due_ms = to_ms("eta", eta) if eta is not None else from_now_ms("countdown", countdown or 0)
        return self.moves.reschedule_by_id(task_id, due_at(due_ms), queue)

    def run_now(self, task_id: str, queue: str | None = None) -> bool:
        """Run a delayed task now, or a ready one before all others. True if it was one."""
        return self.moves.reschedule_by_id(task_id, NOW, queue)

    def terminate(self, task_id: str, queue: str | None = None, *, signal: str = "SIGTERM") -> bool:
        """End the process that runs a task. True if a worker has recorded that it has the task.

        This is Celery's `revoke(task_id, terminate=True)`, which all workers hear. Prefork, gevent
        and eventlet pools can end a task; threads and solo cannot.
        """
        found = self.history(task_id, queue)
        if found is None or found.state not in ("received", "running"):
            return False
        self.app.control.revoke(task_id, terminate=True, signal=signal)
        return True

    def redirect(self, task_id: str, to_queue: str, queue: str | None = None) -> bool:
        """Move a delayed or ready task to another queue, with its due time. True if it was one.

        Raises QueryError for a queue that neither the app nor the broker knows.
        """
        return Redirect(self, to_queue).by_id(task_id, queue)

    def change(
        self,
        task_id: str,
        *,
        queue: str | None = None,
        accepts: Callable[[TaskInfo], bool] = lambda info: True,
        **to: Any,
    ) -> bool:
        """Change `priority`, `args`, `kwargs`, `headers` or the due time of a waiting task.

        The due time is `countdown` or `eta`, as for `reschedule`. The value None removes a
        header. True if the task was delayed or ready, and `accepts` returned True for it. If the
        task has changed since `accepts` saw it, nothing is changed. Raises QueryError, a
        ValueError, for invalid values, and if this process cannot read the arguments.
        """
        return change(self, task_id, Change(**to), queue, accepts)

    # Many.

    def find(
        self,
        query: Query | None = None,
        *,
        progress: Progress = lambda count: None,
        **criteria: Any,
    ) -> Iterator[TaskInfo]:
        """Delayed tasks that match a `Query` or criteria, by queue and due time, read lazily.

        With `state="ready"` it returns ready tasks, the most recent first. `progress` is called
        with the number of messages that were read since the last call.
        """
        query = query_of(query, criteria)
        if selects_ready(query):
            return (each.info for page in matching(self, query, progress) for each in page)
        return (info for _, page in pages(self, query, progress) for info in page)

    def count(self, query: Query, *, progress: Progress = lambda count: None) -> int:
        """The number of tasks that match a query; `progress` as for `find`."""
        return counts_by_shard(self, query, progress).total()

    def cancel_many(
        self, query: Query, *, dry_run: bool = False, progress: Progress | None = None
    ) -> Outcome:
        """Cancel all tasks that match a query. Their results are REVOKED."""
        outcome = change_found(
            self,
            query,
            lambda *found: len(self.moves.cancel(*found)),
            lambda tasks: len(self.moves.cancel_ready(tasks)),
            dry_run,
            progress,
        )
        if not dry_run and not selects_ready(query):
            # These queues may have no consumer that would do it.
            self.store.dictionaries.tidy(self.shards(query.queue), at_once=True)
        return outcome

    def run_now_many(
        self, query: Query, *, dry_run: bool = False, progress: Progress | None = None
    ) -> Outcome:
        """Run all delayed tasks that match a query now. Raises QueryError for ready ones."""
        return change_found(self, query, self.moves.run_now, None, dry_run, progress)

    def reschedule_many(
        self,
        query: Query,
        *,
        by: Length | None = None,
        to: datetime | str | None = None,
        spread: Length | None = None,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> Outcome:
        """Move all tasks that match a query to another due time.

        `by` moves each task by this time (a ready one from now), `to` moves all to one time, and
        `spread` spreads them over this period from `to` (or now), by queue and due time. Raises
        QueryError, a ValueError, for other combinations.
        """
        plan = DuePlan.of(self.moves, by, to, spread)
        if spread is not None:
            plan.counts = counts_by_shard(self, query)
        ways = plan.delayed, plan.ready
        return change_found(self, query, *ways, dry_run, progress, plan.was_moved)

    def redirect_many(
        self,
        query: Query,
        to_queue: str,
        *,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> Outcome:
        """Move all tasks that match a query to another queue, with their due times.

        Raises QueryError for a queue that neither the app nor the broker knows.
        """
        to = Redirect(self, to_queue)
        return change_found(self, query, to.delayed, to.ready, dry_run, progress, to.has)

    def schedule_many(
        self, rows: Iterable[Any], batch: int = 1000, progress: bool | Progress | None = True
    ) -> BulkReport:
        """Send many tasks in few calls: see `bulk.schedule.schedule_many`."""
        return schedule_many(self, rows, batch=batch, progress=progress)

    def backup(
        self, path: FilePath, queue: str | None = None, progress: bool | Progress | None = None
    ) -> BackupReport:
        """Write delayed messages and dead letters to a file: see `control.backup.backup`."""
        return backup(self, path, queue, progress)

    def restore(
        self, path: FilePath, queue: str | None = None, progress: bool | Progress | None = None
    ) -> RestoreReport:
        """Restore a file, each message once: see `control.backup.restore`."""
        return restore(self, path, queue, progress)

    # The whole.

    def counts(self, queue: str | None = None) -> dict[str, Counts]:
        """How many messages each queue has in each state."""
        store = self.store
        shards = store.shards
        return {name: Counts.of(store, shards.all(name)) for name in self._names(queue)}

    def metrics(self, queue: str | None = None) -> dict[str, Metrics]:
        """Metrics of each queue for autoscalers, with one cheap call for each shard."""
        return {name: fold(shards) for name, shards in self.metrics_by_shard(queue).items()}

    def metrics_by_shard(self, queue: str | None = None) -> dict[str, list[Metrics]]:
        """Like `metrics`, for each shard of each queue, by the number of the shard."""
        store = self.store
        return {n: [*map(store.metrics, store.shards.all(n))] for n in self._names(queue)}

    def forecast(
        self,
        hours: float = 24,
        buckets: int = 48,
        queue: str | None = None,
        start: datetime | None = None,
    ) -> Forecast:
        """The number of tasks that are due in each of `buckets` parts of the next `hours`.

        Counted from the partition index, so that no message is read.
        """
        return Forecast.of(self.store, self.shards(queue), hours, buckets, start)

    def consumers(self, queue: str | None = None) -> list[ConsumerInfo]:
        """The consumers, with the time left on their leases and the messages that they hold."""
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
        """Lifecycle events of messages, queue by queue, the oldest first.

        `after` maps each `Event.stream` to the stream id of the last event that you have read.
        """
        for name in self.shards(queue):
            for page in streams.pages(self.store, name, (after or {}).get(name, "-")):
                yield from (each for each in page if task_id in (None, each.id))

    def limits(self, queue: str | None = None) -> list[LimitInfo]:
        """The limits of each queue: capacity, use and waiting messages.

        At most 200,000 waiting messages are read, a few lanes per call.
        """
        names = self._names(queue, also_unused=True)
        return [info for name in names for info in limits(self, gate_usage(self, name))]

    def set_limit(
        self,
        queue: str,
        name: str | None = None,
        *,
        concurrency: int | None = None,
        rate: str | None = None,
        burst: int | None = None,
        why: str = "",
        by: str | None = None,
        for_: float | str | timedelta | None = None,
    ) -> LimitInfo:
        """Change the numbers of a declared limit, for all workers and all waiting messages.

        They apply until `reset_limit`, or for the time `for_`. You can omit `name` if the queue has
        one limit. Numbers that the policy does not limit cannot be set. Raises QueryError, a
        ValueError, for these and for a limit that this app does not declare.
        """
        return set_limit(self, queue, name, concurrency, rate, burst, why, by, for_)

    def reset_limit(self, queue: str, name: str | None = None) -> bool:
        """Restore the declared numbers of a limit. True if others were set."""
        return reset_limit(self, queue, name)

    # Pauses.

    def pause(
        self,
        queue: str,
        *,
        task: str | None = None,
        tenant: str | None = None,
        why: str = "",
        by: str | None = None,
        for_: float | str | timedelta | None = None,
        drain: float | str | timedelta | None = None,
    ) -> QueuePause:
        """Stop workers from starting tasks of a queue until `resume`, or for `for_` ("2h").

        `for_` may also be seconds. With `task`, a name in which * stands for any text, or `tenant`,
        only those tasks of the queue are paused. Due tasks wait, and do not count as late. Running
        tasks and producers continue. `by` is this user and host by default. A second pause replaces
        the end and the reason of the first. `drain` waits until no task of the queue runs, for this
        time at most. Raises QueryError for a queue that is neither the app's nor in the broker, and
        StillRunning.
        """
        return pause(self, queue, Part(task, tenant), why, by, for_, drain)

    def resume(self, queue: str, *, task: str | None = None, tenant: str | None = None) -> bool:
        """End a pause that has the same `task` and `tenant`. True if there was one."""
        return resume(self, queue, Part(task, tenant))

    def pauses(self, queue: str | None = None) -> list[QueuePause]:
        """The paused queues and parts of queues: since when, until when, by whom and why."""
        return pauses(self, [queue] if queue else self.also_unused())

    @property
    def policies(self) -> Policies:
        """The policies that are declared in the broker. Call it to list them."""
        return Policies(self)

    @property
    def dead(self) -> Dead:
        """The dead letters of all queues."""
        return Dead(self)

    @property
    def expectations(self) -> Expectations:
        """Expected answers, and answers that came early."""
        return Expectations(self)
