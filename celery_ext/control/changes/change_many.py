"""Changes all delayed tasks that a query means, or shows what it would change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta

from kombu_delayed.store.calls.shards import queue_of
from kombu_delayed.store.store import CALL_LIMIT

from ...app.queues import Queues
from ...tasks.progress import Progress
from ...tasks.query import Query
from ...tasks.task_info import TaskInfo

#: So many of the tasks that a bulk change has met are in its outcome.
SAMPLE_SIZE = 10


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
    """The tasks that a query means, in pages of one shard; some are empty.

    `progress` is called with the number of messages that were looked at.
    """
    for shard in delayed.shards(query.queue):
        found = delayed.backlog(shard).pages(query.due_after_ms, query.due_before_ms, query.needle)
        for page in found:
            progress(len(page))
            infos = (TaskInfo.waiting(shard, waiting) for waiting in page)
            yield shard, [info for info in infos if query.matches(info)]


def change_many(
    delayed: Queues,
    query: Query,
    change: Callable[[str, list[TaskInfo]], int],
    dry_run: bool,
    progress: Progress | None,
    is_done: Callable[[TaskInfo], bool] = lambda info: False,
) -> Outcome:
    """Change the tasks that a query means, some of one shard at a time.

    `change` says how many of these were still there. Those that are done are left out.
    """
    outcome = Outcome(dry_run=dry_run)
    for shard, page in pages(delayed, query):
        infos = [info for info in page if not is_done(info)]
        for at in range(0, len(infos), CALL_LIMIT):
            part = infos[at : at + CALL_LIMIT]
            outcome.add(queue_of(shard), part, 0 if dry_run else change(shard, part))
        if progress is not None:
            progress(len(infos))
    return outcome


@dataclass
class DuePlan:
    """The due times of a bulk reschedule.

    By so much, or to `start_ms`, or evenly over `spread` from there for `count` tasks.
    """

    by: timedelta | None
    start_ms: int
    spread: timedelta | None
    count: int
    seen: int = 0
    _ahead: set[tuple[str, str]] = field(default_factory=set)

    def next_ms(self, info: TaskInfo) -> int:
        """The due time of the next task, in ms since the epoch."""
        due_ms = self._due_ms(info)
        if due_ms > (info.due_ms or 0):
            self._ahead.add((info.queue, info.member))
        return due_ms

    def _due_ms(self, info: TaskInfo) -> int:
        if self.by is not None:
            return (info.due_ms or 0) + self.by // timedelta(milliseconds=1)
        if self.spread is None:
            return self.start_ms
        share = min(self.seen / max(self.count, 1), 1)
        self.seen += 1
        return self.start_ms + round(self.spread / timedelta(milliseconds=1) * share)

    def was_moved(self, info: TaskInfo) -> bool:
        """Whether it was moved ahead before: it is met again there, once."""
        key = info.queue, info.member
        if key not in self._ahead:
            return False
        self._ahead.remove(key)
        return True
