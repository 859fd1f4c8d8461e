"""The backlog: search it, and choose what to change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celery_ext.errors import QueryError
from celery_ext.http.api import cursors
from celery_ext.http.api.endpoints.by_state import check, ready_page
from celery_ext.http.api.endpoints.due_order import due_page
from celery_ext.http.api.models import Search
from celery_ext.http.api.operations import validated
from celery_ext.http.problems import Problem
from celery_ext.tasks.task_info import TaskInfo

from ..readings import metrics
from ..visit import Form, Shown, View, Visit
from .pausing import pause_of

#: Tasks on a page.
PAGE_SIZE = 50

#: What a search can be by.
FIELDS = ["queue", "task", "tenant", "due_after", "due_before"]

#: The lists of the page, and what each is called.
STATES = {"scheduled": "Delayed", "ready": "Ready"}

Found = Sequence[tuple[str, TaskInfo]]


def name_of(info: TaskInfo) -> str:
    return cursors.write(info.queue, info.id)


def search_of(given: dict[str, Any], **more: Any) -> Search:
    """A search by the fields of a form. Raises a Problem that names the fields."""
    found: Search = validated(Search, {**given, **more})
    return found


def filter_of(form: Form) -> dict[str, str]:
    return form.given(["state", *FIELDS])


def look(visit: Visit) -> Shown:
    params = visit.params()
    cursor = params.get("cursor")
    given = {name: params[name] for name in ("state", *FIELDS) if name in params}
    is_ready = given.get("state") == "ready"
    shown: dict[str, Any] = {
        "filter": given,
        "fields": FIELDS[:3] if is_ready else FIELDS,
        "states": STATES,
        "is_ready": is_ready,
        "is_by_due": False,
        "is_filtered": any(name in given for name in FIELDS),
        "tasks": [],
        "next": None,
        "wrong": {},
        "counts": _counts(visit),
        "queues": visit.queues(),
        "name_of": name_of,
        "may_change": visit.identity.has("schedule"),
        "is_later": cursor is not None,
        "pause": pause_of(visit, given.get("queue")),
        "may_pause": visit.identity.has("admin") and not visit.identity.tenants,
    }
    try:
        shown |= _tasks(visit, search_of(given, limit=PAGE_SIZE, cursor=cursor))
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


def _counts(visit: Visit) -> Any:
    if visit.identity.tenants:
        return None
    found = metrics(visit).values()
    return {name: sum(getattr(m, name) for m in found) for name in ("delayed", "due", "ready")}


VIEWS = [View("backlog", "/backlog", "Backlog", look)]
