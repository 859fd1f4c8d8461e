"""Search for tasks, page by page."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from celery_ext.tasks.query import Query
from celery_ext.tasks.task_info import TaskInfo
from kombu_delayed.inspection.backlog import PAGE_SIZE, Place

from ... import cursors
from ...models import Page, Search
from ...operations import Call, Operations
from ...ready import EMPTY, SEARCH_SECONDS
from ...status import state_of
from .by_state import check, tasks_by_state

#: How many messages one search looks at before it returns what it has found; a fifth of that if it
#: has to decode arguments.
LOOKED_AT = 20_000

operations = Operations("tasks")


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
    infos: list[tuple[str, TaskInfo]] = field(default_factory=list)
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


def search_page(call: Call, search: Search) -> tuple[list[tuple[str, TaskInfo]], str | None]:
    """A page of tasks with their shards, and the next cursor; None: there are no more.

    Reads one shard after the other until it has found enough or looked at enough.
    """
    query = query_of(search)
    shards = sorted(call.service.shards(call.identity, search.queue))
    shard, place = _begin(call, search.cursor)
    found = _Found(search.limit)
    for name in (each for each in shards if each >= shard):
        place = _look_through(call, query, name, place if name == shard else None, found)
        if place is not None or found.is_over:
            return found.infos, _following(name, place, shards)
    return found.infos, None


def query_of(search: Search) -> Query:
    return Query(
        **search.model_dump(include={"queue", "task", "tenant", "where", "due_after", "due_before"})
    )


def _begin(call: Call, cursor: str | None) -> tuple[str, Place | None]:
    shard, due_ms, member = cursors.read_place(cursor, call.identity)
    return shard, Place(due_ms, member.encode(errors="surrogateescape")) if member else None


def _look_through(
    call: Call, query: Query, name: str, place: Place | None, found: _Found
) -> Place | None:
    """Search a shard; returns where its next page begins, or None if it has no more."""
    is_narrow = bool(
        query.task or query.tenant or query.where or query.root_id or call.identity.tenants
    )
    while True:  # at least one page, however late it is
        size = min(-(-found.left // query.weight), PAGE_SIZE if is_narrow else found.missing)
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


def _following(shard: str, place: Place | None, shards: list[str]) -> str | None:
    """The cursor of the next page: after the place, or else in the next shard, if there is one."""
    if place is not None:
        member = place.member.decode(errors="surrogateescape")
        return cursors.write(shard, place.due_ms, member)
    later = next((each for each in shards if each > shard), None)
    return None if later is None else cursors.write(later, 0, "")
