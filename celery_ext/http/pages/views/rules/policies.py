"""The pauses, and the policies that all workers of a queue obey. Forms pause and resume queues."""

from __future__ import annotations

from pydantic import BaseModel
from starlette.responses import Response

from celery_ext.control.policies.pauses import QueuePause
from celery_ext.http.api.endpoints.rules.pauses import pause, resume
from celery_ext.http.api.fields import Name
from celery_ext.http.api.models import NewPause, Part
from celery_ext.http.api.operations import validated

from ...visit import Action, Form, Shown, View, Visit, asked

#: How old a reading may be, and how many queues are shown.
SECONDS, SHOWN = 2.0, 200

VERBS = {"pause": "Pause", "resume": "Resume"}


class Asked(BaseModel):
    """The queue to show; None: all."""

    queue: Name | None = None


def look(visit: Visit) -> Shown:
    query = asked(visit, Asked)
    delayed, cache = visit.service.delayed, visit.service.cache
    names = visit.chosen_queues(query.queue)
    found = cache.get(("policies", *names), SECONDS, lambda: delayed.policies.of(names))
    pauses = cache.get(
        ("pauses", *names), SECONDS, lambda: [one for each in names for one in delayed.pauses(each)]
    )
    return {
        "queue": query.queue,
        "pauses": pauses,
        "policies": found[:SHOWN],
        "count": len(found),
        "queues": visit.queues(),
        "may_pause": visit.identity.has("admin"),
    }


def pause_of(visit: Visit, queue: str | None) -> QueuePause | None:
    """The pause of a page's queue; None: there is none, or the visitor may not see it."""
    if queue is None or visit.identity.tenants:
        return None
    found = visit.service.delayed.pauses(queue)
    return next((each for each in found if each.task is None and each.tenant is None), None)


def _apply(visit: Visit, form: Form) -> str:
    """Pause or resume as a form requests; returns the queue."""
    verb, queue = form.verb(VERBS), form.one("queue")
    part = validated(Part, form.given(["task", "tenant"])).model_dump()
    if verb == "pause":
        new = validated(NewPause, form.given(["why", "for"]))
        pause(visit, queue, new.why, new.length, **part)
    else:
        resume(visit, queue, **part)
    visit.service.cache.forget()
    return queue


def on_backlog(visit: Visit, form: Form) -> Response:
    return visit.redirect("/backlog", queue=_apply(visit, form))


def on_policies(visit: Visit, form: Form) -> Response:
    _apply(visit, form)
    return visit.redirect("/policies")


VIEWS = [View("policies", "/policies", "Policies", look, seconds=5, is_whole=True)]
ACTIONS = [
    Action("/backlog/pause", on_backlog, "admin"),
    Action("/policies/pause", on_policies, "admin"),
]
