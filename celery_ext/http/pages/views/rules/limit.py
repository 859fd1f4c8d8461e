"""One limit: its keys, and the tasks that wait for it."""

from __future__ import annotations

from pydantic import BaseModel

from celery_ext.control.policies.limits import limit
from celery_ext.http.api.endpoints.rules.limits import keys_of, usage_of, waiting_tasks
from celery_ext.http.api.fields import Cursor, Name

from ...visit import Shown, View, Visit, asked
from .tenants import words_of

#: Keys on a page.
PAGE_SIZE = 50


class _Asked(BaseModel):
    queue: Name
    name: Name
    key: Name | None = None
    cursor: Cursor | None = None


def look(visit: Visit) -> Shown:
    query: _Asked = asked(visit, _Asked)
    visit.identity.check_queue(query.queue)
    delayed, usage = visit.service.delayed, usage_of(visit, query.queue)
    shown = {"filter": query.model_dump(), "words_of": words_of}
    info = limit(delayed, usage, query.name)
    if info is None:
        return {**shown, "limit": None, "status": 404}
    page, following = keys_of(visit, usage, info, query, PAGE_SIZE)
    return {
        **shown,
        "limit": info,
        "page": info.shares or page,
        "next": following,
        "tasks": waiting_tasks(visit, usage, query.name),
    }


VIEWS = [View("limit", "/limit", "", look, seconds=2)]
