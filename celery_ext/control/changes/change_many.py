"""Changes all tasks that match a query, or previews the change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from kombu_delayed.store.calls.shards import queue_of
from kombu_delayed.store.store import chunks

from ...app.queues import Queues
from ...errors import QueryError
from ...tasks.progress import Progress
from ...tasks.query import Query, selects_ready
from ...tasks.task_info import TaskInfo
from .ready import ReadyTask, matching

#: How many of the tasks that a bulk change has matched are in its outcome.
SAMPLE_SIZE = 10

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
        found = delayed.backlog(shard).pages(query.due_after_ms, query.due_before_ms, query.needle)
        for page in found:
            progress(len(page))
            infos = (TaskInfo.waiting(shard, waiting) for waiting in page)
            yield shard, [info for info in infos if query.matches(info)]


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
    for shard, infos, change in _parts(queues, query, on_delayed, on_ready, is_done):
        outcome.add(queue_of(shard), infos, 0 if dry_run else change())
        if progress is not None:
            progress(len(infos))
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
