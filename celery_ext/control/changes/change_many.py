"""Changes all tasks that match a query, or previews the change; plans their new due times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cached_property, partial
from itertools import groupby

from kombu_delayed.store.calls.shards import queue_of
from kombu_delayed.store.store import chunks

from ...app.queues import Queues
from ...errors import QueryError
from ...tasks.progress import Progress
from ...tasks.query import Query, selects_ready
from ...tasks.task_info import TaskInfo
from ...tasks.times import Length, from_now_ms, to_length, to_ms
from .moves import Moves, due_at
from .ready import ReadyTask, matching

#: How many of the tasks that a bulk change has matched are in its outcome.
SAMPLE_SIZE = 10

#: How often the ready lists are read at most, while others change the same tasks.
PASSES = 10

#: Change delayed tasks of a shard, or ready ones. Return how many were still there.
OnDelayed = Callable[[str, list[TaskInfo]], int]
OnReady = Callable[[Sequence[ReadyTask]], int]

#: Returns whether a task needs no change.
IsDone = Callable[[TaskInfo], bool]


@dataclass
class Outcome:
    """The result of a bulk change, or with `dry_run` a preview of it."""

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


def pages(
    delayed: Queues, query: Query, progress: Progress = lambda count: None
) -> Iterator[tuple[str, list[TaskInfo]]]:
    """The tasks that match a query, in pages of one shard; some pages are empty.

    `progress` is called with the number of messages that were read.
    """
    for shard in delayed.shards(query.queue):
        for page in shard_pages(delayed, shard, query, progress):
            yield shard, page


def shard_pages(
    delayed: Queues, shard: str, query: Query, progress: Progress
) -> Iterator[list[TaskInfo]]:
    """Like `pages`, for one shard, whichever queue the query names."""
    found = delayed.backlog(shard).pages(query.due_after_ms, query.due_before_ms, query.needle)
    for page in found:
        progress(len(page))
        infos = (TaskInfo.waiting(shard, waiting) for waiting in page)
        yield [info for info in infos if query.matches(info)]


def counts_by_shard(
    delayed: Queues, query: Query, progress: Progress = lambda count: None
) -> Counter[str]:
    """The number of tasks that match a query, by shard, in the order of `pages`."""
    counts = Counter[str]()
    if selects_ready(query):
        for tasks in matching(delayed, query, progress):
            counts.update(each.shard for each in tasks)
    else:
        for shard, infos in pages(delayed, query, progress):
            counts[shard] += len(infos)
    return counts


def change_found(
    queues: Queues,
    query: Query,
    on_delayed: OnDelayed,
    on_ready: OnReady | None,
    dry_run: bool,
    progress: Progress | None,
    is_done: IsDone = lambda info: False,
) -> Outcome:
    """Change the tasks that match a query, some of one shard at a time, or preview the change.

    Tasks that need no change are skipped. Raises QueryError for ready tasks without `on_ready`.
    """
    outcome = Outcome(dry_run=dry_run)
    for n in range(PASSES if selects_ready(query) and not dry_run else 1):
        matched = changed = 0
        for shard, infos, change in _parts(queues, query, on_delayed, on_ready, is_done):
            count = 0 if dry_run else change()
            matched, changed = matched + len(infos), changed + count
            counted = infos[:count] if n else infos  # the others were counted before
            outcome.add(queue_of(shard), counted, count)
            if progress is not None:
                progress(len(counted))
        if changed in (0, matched):
            break  # else others change the same tasks, so that the pages may have skipped some
    return outcome


def _parts(
    queues: Queues, query: Query, on_delayed: OnDelayed, on_ready: OnReady | None, is_done: IsDone
) -> Iterator[tuple[str, list[TaskInfo], Callable[[], int]]]:
    """Yields a shard, some of its tasks, and a function that changes them."""
    if not selects_ready(query):
        for shard, page in pages(queues, query):
            # A whole page is filtered before any of it is changed.
            for part in map(list, chunks([info for info in page if not is_done(info)])):
                yield shard, part, partial(on_delayed, shard, part)
        return
    if on_ready is None:
        raise QueryError("tasks that are ready run as soon as a worker is free: run one by id")
    for found in matching(queues, query):
        if tasks := [each for each in found if not is_done(each.info)]:
            yield tasks[0].shard, [each.info for each in tasks], partial(on_ready, tasks)


@dataclass
class DuePlan:
    """Moves tasks by a length of time, or to `start_ms`, or evenly over `spread` from there.

    `counts` is the number of tasks to spread, by shard.
    """

    moves: Moves
    now_ms: int
    by: timedelta | None
    start_ms: int
    spread: timedelta | None
    counts: Mapping[str, int] = field(default_factory=dict)
    _seen: Counter[str] = field(default_factory=Counter)
    _ahead: set[tuple[str, str]] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        moves: Moves,
        by: Length | None,
        to: datetime | str | None,
        spread: Length | None,
    ) -> DuePlan:
        """Raises QueryError for an invalid combination or an invalid length of time."""
        if (by is None) == (to is None and spread is None):
            raise QueryError("reschedule_many takes by=, or to= and spread=, or one of these two")
        now_ms = from_now_ms("to", 0)
        start_ms = now_ms if to is None else to_ms("to", to)
        period = to_length("spread", spread)
        if period is not None and period < timedelta(0):
            raise QueryError(f"spread is a length of time from 0 on, not {spread!r}")
        return cls(moves, now_ms, to_length("by", by), start_ms, period)

    def delayed(self, shard: str, infos: list[TaskInfo]) -> int:
        """Move delayed tasks of a shard; returns how many were still there."""
        dues = [due_at(self._next_ms(shard, info)) for info in infos]
        return self.moves.reschedule(shard, infos, dues)

    def ready(self, tasks: Sequence[ReadyTask]) -> int:
        """Delay ready tasks; returns how many were still ready. Raises QueryError for the past."""
        dues = [self._due_ms(t.shard, replace(t.info, due_ms=self.now_ms)) for t in tasks]
        if any(due_ms < self.now_ms + (not self.spread) for due_ms in dues):
            raise QueryError("tasks that are ready can only be moved to a later time")
        # The first one of a spread from now on stays as it is.
        later = [(task, due) for task, due in zip(tasks, dues, strict=True) if due > self.now_ms]
        moved = self.moves.postpone_all([each[0] for each in later], [due_at(d) for _, d in later])
        return len(tasks) - len(later) + moved

    def _next_ms(self, shard: str, info: TaskInfo) -> int:
        """The due time of a delayed task, in ms since the epoch."""
        due_ms = self._due_ms(shard, info)
        if due_ms > (info.due_ms or 0):
            self._ahead.add((info.queue, info.member))
        return due_ms

    def _due_ms(self, shard: str, info: TaskInfo) -> int:
        if self.by is not None:
            return (info.due_ms or 0) + self.by // timedelta(milliseconds=1)
        if self.spread is None:
            return self.start_ms
        count = max(sum(self.counts.values()), 1)
        first, step = self._places.get(shard, (count, 0))
        share = min((first + step * self._seen[shard]) / count, 1)
        self._seen[shard] += 1
        return self.start_ms + round(self.spread / timedelta(milliseconds=1) * share)

    @cached_property
    def _places(self) -> dict[str, tuple[float, float]]:
        """The place of the first task of each shard among all, and the distance to the next one.

        Queues follow each other. Within a queue, each shard is spread over the whole part of the
        period, because it has tasks with all due times.
        """
        found, before = dict[str, tuple[float, float]](), 0
        for _, shards in groupby(self.counts, queue_of):
            own = {shard: count for shard in shards if (count := self.counts[shard])}
            size = sum(own.values())
            for n, (shard, count) in enumerate(own.items()):
                step = size / count
                found[shard] = before + step * n / len(own), step
            before += size
        return found

    def was_moved(self, info: TaskInfo) -> bool:
        """Returns whether a task was moved ahead before. It is then met again there, once."""
        key = info.queue, info.member
        if key not in self._ahead:
            return False
        self._ahead.remove(key)
        return True
