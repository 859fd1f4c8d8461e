"""Pauses and resumes queues from the backlog page, and parts of queues from the policies page."""

from __future__ import annotations

from starlette.responses import Response

from celery_ext.control.policies.pauses import QueuePause
from celery_ext.http.api.endpoints.rules.pauses import pause, resume
from celery_ext.http.api.models import NewPause, Part
from celery_ext.http.api.operations import validated

from ...visit import Action, Form, Visit

VERBS = {"pause": "Pause", "resume": "Resume"}


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
        asked: NewPause = validated(NewPause, form.given(["why", "for"]))
        pause(visit, queue, asked.why, asked.length, **part)
    else:
        resume(visit, queue, **part)
    visit.service.cache.forget()
    return queue


def on_backlog(visit: Visit, form: Form) -> Response:
    return visit.redirect("/backlog", queue=_apply(visit, form))


def on_policies(visit: Visit, form: Form) -> Response:
    _apply(visit, form)
    return visit.redirect("/policies")


ACTIONS = [
    Action("/backlog/pause", on_backlog, "admin"),
    Action("/policies/pause", on_policies, "admin"),
]
