"""The backlog: search it, and choose what to change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celery_ext.errors import QueryError
from celery_ext.http.api import cursors
from celery_ext.http.api.endpoints.lists.by_state import check, ready_page
from celery_ext.http.api.endpoints.lists.search import due_page
from celery_ext.http.api.models import Search
from celery_ext.http.api.operations import validated
from celery_ext.http.problems import Problem
from celery_ext.tasks.task_info import TaskInfo

from ... import sorting
from ...readings import metrics
from ...sorting import Order
from ...visit import Form, Shown, View, Visit
from ..rules.policies import pause_of

#: Tasks on a page.
PAGE_SIZE = 50

#: The criteria of a search.
FIELDS = ["queue", "task", "tenant", "where", "due_after", "due_before"]

#: Criteria that may take reading many tasks: a list with one of them is not updated live.
SEARCHED = ["task", "tenant", "where"]

#: The lists of the page, and their labels.
STATES = {"scheduled": "Delayed", "ready": "Ready"}

#: The sort orders of a list. Without one, a list is in the order of the broker.
SORTS: sorting.Sorts = {
    "due": ("due time", lambda info: info.due_ms or 0),
    "task": ("task", lambda info: info.task),
    "queue": ("queue", lambda info: info.queue),
    "tenant": ("tenant", lambda info: info.tenant or ""),
    "priority": ("priority", lambda info: -info.priority),
}

Found = Sequence[tuple[str, TaskInfo]]


def name_of(info: TaskInfo) -> str:
    return cursors.write(info.queue, info.id)


def search_of(given: dict[str, Any], **more: Any) -> Search:
    """A search by the fields of a form. Raises a Problem that names the fields."""
    return validated(Search, {**given, **more})


def filter_of(form: Form) -> dict[str, str]:
    return form.given(["state", *FIELDS])


def look(visit: Visit) -> Shown:
    params = visit.params()
    cursor = params.get("cursor")
    given = {name: params[name] for name in ("state", *FIELDS) if name in params}
    is_ready = given.get("state") == "ready"
    order = Order.of(visit, SORTS)
    shown: dict[str, Any] = {
        **sorting.shown(order, SORTS),
        "filter": given,
        "fields": FIELDS[:4] if is_ready else FIELDS,
        "states": STATES,
        "is_ready": is_ready,
        "is_live": not order.sort and not any(name in given for name in SEARCHED),
        "is_by_due": False,
        "is_filtered": any(name in given for name in FIELDS),
        "tasks": [],
        "next": None,
        "wrong": {},
        "counts": _counts(visit, given.get("queue") or None),
        "queues": visit.queues(),
        "name_of": name_of,
        "may_change": visit.identity.has("schedule"),
        "is_later": cursor is not None or order.start > 0,
        "pause": pause_of(visit, given.get("queue")),
        "may_pause": visit.identity.has("admin") and not visit.identity.tenants,
    }
    try:
        search = search_of(given, limit=PAGE_SIZE, cursor=cursor)
        shown |= _sorted(visit, search, order) if order.sort else _tasks(visit, search)
    except QueryError as error:
        shown |= {"wrong": {"due_after": str(error)}, "status": 422}
    except Problem as problem:
        if problem.status_code != 422:
            raise
        shown |= {"wrong": dict(problem.errors), "status": 422}
    return shown


def _tasks(visit: Visit, search: Search) -> Shown:
    if search.state not in STATES:
        raise Problem.of_field("state", f"it is one of {', '.join(STATES)}")
    check(search)
    if search.state == "ready":
        ready, following = ready_page(visit, search, search.limit, search.cursor)
        return {"tasks": [each.info for each in ready], "next": following}
    found, following, is_by_due = due_page(visit, search)
    return {"tasks": [info for _, info in found], "next": following, "is_by_due": is_by_due}


def _sorted(visit: Visit, search: Search, order: Order) -> Shown:
    def read(limit: int, cursor: str | None) -> tuple[Sequence[TaskInfo], str | None]:
        page = _tasks(visit, search.model_copy(update={"limit": limit, "cursor": cursor}))
        return page["tasks"], page["next"]

    found, is_partial = sorting.read_first(read, sorting.SORTED, sorting.LOOK_SECONDS)
    page, following = order.part(found, SORTS, search.limit)
    return {
        "tasks": page,
        "following": following,
        "sorted_of": (len(found), is_partial),
    }


def _counts(visit: Visit, queue: str | None) -> Any:
    if visit.identity.tenants:
        return None
    found = metrics(visit, queue).values()
    return {name: sum(getattr(m, name) for m in found) for name in ("delayed", "due", "ready")}


VIEWS = [View("backlog", "/backlog", "Backlog", look, seconds=5)]
