"""Search for tasks, page by page: by queue, or in the order of their due times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice
from time import monotonic
from typing import Any

from celery_ext.tasks.query import Query
from celery_ext.tasks.task_info import TaskInfo
from kombu_delayed.inspection.backlog import NEVER_MS, PAGE_SIZE, Place

from ... import cursors
from ...models import Page, Search
from ...operations import Call, Operations
from ...ready import EMPTY, SEARCH_SECONDS
from ...status import state_of
from .by_state import check, tasks_by_state

#: How many messages one search looks at before it returns what it has found; a fifth of that if it
#: has to decode arguments.
LOOKED_AT = 20_000

#: The most shards whose tasks are brought into one order: each shard takes a call.
MOST_SHARDS = 200

operations = Operations("tasks")

#: Tasks with their shards.
Tasks = list[tuple[str, TaskInfo]]


@operations.add("GET", "/v1/tasks", "read", Page, query=Search, is_search=True)
def search_tasks(call: Call) -> dict[str, Any]:
    """Search tasks: delayed ones by queue and due time, or those of another state."""
    check(call.query)
    if call.query.state == "scheduled":
        return page_of(call, call.query)
    found, following = tasks_by_state(call, call.query)
    return {"tasks": found, "next": following}


def page_of(call: Call, search: Search) -> dict[str, Any]:
    found, following = search_page(call, search)
    return {"tasks": [state_of(call.service, info) for _, info in found], "next": following}


@dataclass
class _Found:
    """The result of one search. It may look at `left` more messages."""

    limit: int
    infos: Tasks = field(default_factory=list)
    left: int = field(default_factory=lambda: LOOKED_AT)
    until: float = field(default_factory=lambda: monotonic() + SEARCH_SECONDS)

    @property
    def missing(self) -> int:
        return self.limit - len(self.infos)

    @property
    def is_over(self) -> bool:
        """Whether it has found enough, or has looked at enough, or for long enough."""
        return self.left <= 0 or self.missing <= 0 or self.is_late

    @property
    def is_late(self) -> bool:
        return monotonic() >= self.until


def search_page(call: Call, search: Search) -> tuple[Tasks, str | None]:
    """A page of tasks with their shards, and the next cursor; None: there are no more.

    Reads one shard after the other until it has found enough or looked at enough.
    """
    query = Query(**search.criteria)
    shards = sorted(call.service.shards(call.identity, search.queue))
    shard, place = _begin(call, search.cursor)
    found = _Found(search.limit)
    for name in (each for each in shards if each >= shard):
        place = _look_through(call, query, name, place if name == shard else None, found)
        if place is not None or found.is_over:
            return found.infos, _following(call, name, place, shards)
    return found.infos, None


def _begin(call: Call, cursor: str | None) -> tuple[str, Place | None]:
    shard, due_ms, member = cursors.read_place(call, cursor)
    return shard, Place(due_ms, member.encode(errors="surrogateescape")) if member else None


def _look_through(
    call: Call, query: Query, name: str, place: Place | None, found: _Found
) -> Place | None:
    """Search a shard; returns where its next page begins, or None if it has no more."""
    while True:  # at least one page, however late it is
        most = PAGE_SIZE if _is_narrow(call, query) else found.missing
        size = min(-(-found.left // query.weight), most)
        page, place, looked_at = call.service.delayed.backlog(name).page(
            place, query.due_after_ms, query.due_before_ms, query.needle, size
        )
        found.left -= EMPTY + looked_at * query.weight
        for waiting in page:
            info = TaskInfo.waiting(name, waiting)
            if query.matches(info) and call.identity.sees(info.queue, info.tenant):
                found.infos.append((name, info))
            if not found.missing or found.is_late:
                member = waiting.member.encode(errors="surrogateescape")
                return Place(waiting.kept.due_ms, member)
        if place is None or found.is_over:
            return place


def of_root(call: Call, root: str, limit: int) -> tuple[list[TaskInfo], bool]:
    """Delayed tasks of a canvas by the id of its first task, and whether there may be more."""
    query, found = Query(root_id=root), _Found(limit)
    for name in sorted(call.service.shards(call.identity)):
        place = _look_through(call, query, name, None, found)
        if place is not None or found.is_over:
            return [info for _, info in found.infos], True
    return [info for _, info in found.infos], False


def _following(call: Call, shard: str, place: Place | None, shards: list[str]) -> str | None:
    """The cursor of the next page: after the place, or else in the next shard, if there is one."""
    if place is not None:
        member = place.member.decode(errors="surrogateescape")
        return cursors.write_place(call, shard, place.due_ms, member)
    later = next((each for each in shards if each > shard), None)
    return None if later is None else cursors.write_place(call, later, 0, "")


def due_page(call: Call, search: Search) -> tuple[Tasks, str | None, bool]:
    """As `search_page`, and whether the page is in the order of due times over all queues.

    It is by queue if there are too many shards, or if the search is for some tasks only: those of
    each queue would have to be found first.
    """
    shards = sorted(call.service.shards(call.identity, search.queue))
    if _is_narrow(call, Query(**search.criteria)) or len(shards) > MOST_SHARDS:
        return (*search_page(call, search), len(shards) == 1)
    place = cursors.read_place(call, search.cursor)
    each = (_tasks(call, search, shard, place, len(shards)) for shard in shards)
    found = [*islice(merge(*each), search.limit + 1)]
    following = None
    if len(found) > search.limit:
        due_ms, shard, _, info = found[search.limit - 1]
        following = cursors.write_place(call, shard, due_ms, info.member)
    return [(shard, info) for _, shard, _, info in found[: search.limit]], following, True


def _is_narrow(call: Call, query: Query) -> bool:
    """Returns whether a search is for some tasks only: many may be read to find one."""
    return bool(query.task or query.tenant or query.where or query.root_id or call.identity.tenants)


def _tasks(
    call: Call, search: Search, shard: str, place: tuple[str, int, str], shards: int
) -> Iterator[tuple[int, str, int, TaskInfo]]:
    """The tasks of a shard after a place, each as due time, shard, number and task."""
    query, number, begins = Query(**search.criteria), 0, None
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
