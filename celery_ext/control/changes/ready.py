"""Cancels and changes tasks that are ready: they wait for a free worker in Kombu's own lists."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kombu_delayed.inspection.lookup import Found
from kombu_delayed.inspection.ready.index import MOST
from kombu_delayed.inspection.ready.lists import Ready, ReadyLists, id_of, needles_of
from kombu_delayed.message.envelope import open_envelope, to_json

from ...app.queues import Queues
from ...tasks.body import payload_of
from ...tasks.progress import Progress
from ...tasks.query import Query
from ...tasks.task_info import TaskInfo
from ..outcomes import SHORT, certain_ids


class ReadyTask(NamedTuple):
    """A ready task, and where it was found."""

    shard: str
    lists: ReadyLists
    ready: Ready
    info: TaskInfo


def ready_pages(
    queues: Queues, shards: Sequence[str], needles: Sequence[str] = ()
) -> Iterator[list[ReadyTask]]:
    """The ready tasks of some shards, in bounded pages: the most urgent first, then the latest."""
    for shard in shards:
        lists = queues.ready_index.lists(queues.store, shard)
        for page in lists.pages(needles):
            yield [ready_task(shard, lists, each) for each in page if id_of(each.message)]


def ready_task(shard: str, lists: ReadyLists, ready: Ready) -> ReadyTask:
    """The task of a ready message."""
    envelope = open_envelope(ready.message, 0)
    found = Found("ready", shard, ready.step, ready.message, envelope.due_ms)
    return ReadyTask(shard, lists, ready, replace(TaskInfo.of(found), member=envelope.id))


def ready_tasks(queues: Queues, ids: Sequence[str], queue: str | None) -> Iterator[ReadyTask]:
    """The ready tasks with these ids, found where they were seen before, or else by a scan.

    Long lists are not read for a task that workers have recorded as received, running or over.
    """
    own = [queue] if queue else [*queues.app.amqp.queues] if ids else []
    shards = [shard for name in own for shard in queues.store.shards.all(name)]
    certain, found = certain_ids(queues, own, ids), set[str]()
    for task in placed(queues, shards, ids, certain):
        found.add(task.info.id)
        yield task
    ids = [id for id in ids if id not in found | certain]
    for names in queues.where(queue, ids, found := set()) if ids else ():
        for page in ready_pages(queues, names, needles_of(ids)):
            for task in page:
                if task.info.id in ids:
                    found.add(task.info.id)
                    yield task


def placed(
    queues: Queues, shards: Sequence[str], ids: Iterable[str], certain: Collection[str]
) -> Iterator[ReadyTask]:
    """The ready tasks of some shards that are found where they were seen before.

    Long lists are not read for ids whose records are `certain`. Tasks that share an id are not
    found, and neither are tasks of a list that is too long for this.
    """
    for id in ids:
        most = SHORT if id in certain else MOST
        found, _ = queues.ready_index.find(queues.store, shards, id, most)
        if not queues.ready_index.is_shared(shards, id):
            yield from (ready_task(each.lists.queue, *each) for each in found)


def matching(
    queues: Queues, query: Query, progress: Progress = lambda count: None
) -> Iterator[list[ReadyTask]]:
    """The ready tasks that match a query, in pages; some pages are empty.

    `progress` is called with the number of messages that were read.
    """
    needles = [query.needle] if query.needle else []
    for page in ready_pages(queues, queues.shards(query.queue), needles):
        progress(len(page))
        yield [each for each in page if _is_due(query, each.info) and query.matches(each.info)]


def _is_due(query: Query, info: TaskInfo) -> bool:
    """Returns whether a task was due in the period of a query. Without a period, any task was."""
    if query.due_after is None and query.due_before is None:
        return True
    return info.due_ms is not None and query.due_after_ms <= info.due_ms < query.due_before_ms


def amend(
    task: ReadyTask,
    rewrite: Callable[[dict[str, Any]], None],
    *,
    step: int | None = None,
    due_ms: int | None = None,
    is_first: bool = False,
) -> bool:
    """Change the message of a ready task. False if it is no longer ready, or has changed.

    With `due_ms` it is delayed until then, as if it had been sent with this due time.
    """
    payload = payload_of(task.info)
    if due_ms is not None:
        for name in ("due_ms", "wait"):
            payload.pop(name, None)
    rewrite(payload)
    return task.lists.amend(
        task.ready,
        task.info.id,
        to_json(payload).encode(),
        step=step,
        due_ms=due_ms,
        is_first=is_first,
    )
