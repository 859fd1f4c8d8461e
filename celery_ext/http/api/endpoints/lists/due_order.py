"""Delayed tasks of several queues in the order of their due times, page by page."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge
from itertools import islice

from celery_ext.tasks.task_info import TaskInfo
from kombu_delayed.inspection.backlog import NEVER_MS, Place

from ... import cursors
from ...models import Search
from ...operations import Call
from .search import query_of, search_page

#: The most shards whose tasks are brought into one order: each shard takes a call.
MOST_SHARDS = 200

Found = list[tuple[str, TaskInfo]]


def due_page(call: Call, search: Search) -> tuple[Found, str | None, bool]:
    """As `search_page`, and whether the page is in the order of due times over all queues.

    It is by queue if there are too many shards, or if the search is for some tasks only: those of
    each queue would have to be found first.
    """
    shards = sorted(call.service.shards(call.identity, search.queue))
    is_narrow = bool(search.task or search.tenant or search.where or call.identity.tenants)
    if is_narrow or len(shards) > MOST_SHARDS:
        return (*search_page(call, search), len(shards) == 1)
    place = cursors.read_place(search.cursor, call.identity)
    each = (_tasks(call, search, shard, place, len(shards)) for shard in shards)
    found = [*islice(merge(*each), search.limit + 1)]
    following = None
    if len(found) > search.limit:
        due_ms, shard, _, info = found[search.limit - 1]
        following = cursors.write(shard, due_ms, info.member)
    return [(shard, info) for _, shard, _, info in found[: search.limit]], following, True


def _tasks(
    call: Call, search: Search, shard: str, place: tuple[str, int, str], shards: int
) -> Iterator[tuple[int, str, int, TaskInfo]]:
    """The tasks of a shard after a place, each as due time, shard, number and task."""
    query, number, begins = query_of(search), 0, None
    after_ms = query.due_after_ms
    if shard == place[0] and place[2]:
        begins = Place(place[1], place[2].encode(errors="surrogateescape"))
    elif place[0]:  # of tasks that are due at the same time, those of earlier shards were shown
        after_ms = max(after_ms, place[1] + (shard < place[0]))
    backlog, size = call.service.delayed.backlog(shard), search.limit // shards + 1
    while after_ms < min(query.due_before_ms, NEVER_MS):
        page, begins, _ = backlog.page(begins, after_ms, query.due_before_ms, "", size)
        for waiting in page:
            info, number = TaskInfo.waiting(shard, waiting), number + 1
            if call.identity.sees(info.queue, info.tenant):
                yield waiting.kept.due_ms, shard, number, info
        if begins is None:
            return
        size = search.limit
