"""The backlog: search it, and choose what to change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celery_ext.errors import QueryError
from celery_ext.http.api import cursors
from celery_ext.http.api.endpoints.search import search_page
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

Found = Sequence[tuple[str, TaskInfo]]


def name_of(info: TaskInfo) -> str:
    return cursors.write(info.queue, info.id)


def search_of(given: dict[str, Any], **more: Any) -> Search:
    """A search by the fields of a form. Raises a Problem that names the fields."""
    found: Search = validated(Search, {**given, **more})
    return found


def filter_of(form: Form) -> dict[str, str]:
    return form.given(FIELDS)


def look(visit: Visit) -> Shown:
    params = visit.params()
    cursor = params.get("cursor")
    given = {name: params[name] for name in FIELDS if name in params}
    shown: dict[str, Any] = {
        "filter": given,
        "fields": FIELDS,
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
        found, following = search_page(visit, search_of(given, limit=PAGE_SIZE, cursor=cursor))
        shown |= {"tasks": [info for _, info in found], "next": following}
    except QueryError as error:
        shown |= {"wrong": {"due_after": str(error)}, "status": 422}
    except Problem as problem:
        if problem.status_code != 422:
            raise
        shown |= {"wrong": dict(problem.errors), "status": 422}
    return shown


def _counts(visit: Visit) -> Any:
    if visit.identity.tenants:
        return None
    found = metrics(visit).values()
    return {"delayed": sum(m.delayed for m in found), "due": sum(m.due for m in found)}


VIEWS = [View("backlog", "/backlog", "Backlog", look)]
