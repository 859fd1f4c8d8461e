"""Changes all delayed tasks that a query means, or shows what it would change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kombu_delayed.store.calls.shards import queue_of
from kombu_delayed.store.store import chunks

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
        for part in map(list, chunks(infos)):
            outcome.add(queue_of(shard), part, 0 if dry_run else change(shard, part))
            if progress is not None:
                progress(len(part))
    return outcome
