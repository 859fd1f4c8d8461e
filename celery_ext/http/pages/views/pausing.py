"""Pauses and resumes a queue, from the page of its backlog."""

from __future__ import annotations

from starlette.responses import Response

from celery_ext.control.pauses import QueuePause
from celery_ext.http.api.endpoints.pauses import pause, resume
from celery_ext.http.api.models import NewPause
from celery_ext.http.api.operations import validated

from ..visit import Action, Form, Visit

VERBS = {"pause": "Pause", "resume": "Resume"}


def pause_of(visit: Visit, queue: str | None) -> QueuePause | None:
    """The pause of the queue that a page is about; None: there is none, or it is not for this."""
    if queue is None or visit.identity.tenants:
        return None
    found = visit.service.delayed.pauses(queue)
    return next((each for each in found if each.task is None and each.tenant is None), None)


def apply(visit: Visit, form: Form) -> Response:
    verb, queue = form.verb(VERBS), form.one("queue")
    if verb == "pause":
        asked: NewPause = validated(NewPause, form.given(["why", "for"]))
        pause(visit, queue, asked.why, asked.length)
    else:
        resume(visit, queue)
    visit.service.cache.forget()
    return visit.redirect("/backlog", queue=queue)


ACTIONS = [Action("/backlog/pause", apply, "admin")]
