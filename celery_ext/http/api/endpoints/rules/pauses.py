"""Pause and resume queues."""

from __future__ import annotations

from typing import Any

from celery_ext.control.policies.pauses import QueuePause
from celery_ext.errors import QueryError
from celery_ext.http.problems import Problem
from celery_ext.tasks.times import info_data

from ...fields import span_of
from ...models import NewPause, Part, PauseState
from ...operations import Call, Operations

operations = Operations("queues", "/v1/queues/{queue}")


@operations.add("GET", "/pause", "read", PauseState, query=Part)
def get_pause(call: Call) -> dict[str, Any]:
    """Whether a queue, or a task or a tenant in it, is paused, by whom and why."""
    call.identity.require_whole()
    return _state(call, call.query)


@operations.add("POST", "/pause", "admin", PauseState, body=NewPause, problems=(404,))
def pause_queue(call: Call) -> dict[str, Any]:
    """Pause a queue, or a task or a tenant in it: no worker starts its tasks."""
    pause(call, call.queue, call.body.why, call.body.length, **_part(call.body))
    return _state(call, call.body)


@operations.add("POST", "/resume", "admin", PauseState, query=Part)
def resume_queue(call: Call) -> dict[str, Any]:
    """Resume a paused queue, or a task or a tenant in it."""
    resume(call, call.queue, **_part(call.query))
    return _state(call, call.query)


def pause(
    call: Call, queue: str, why: str, length: str | float | None, **part: str | None
) -> QueuePause:
    """Pause a queue, or a part of it, for the caller. Raises a Problem if it does not exist."""
    call.identity.require_whole()
    call.identity.check_queue(queue)
    call.note("pause", queue)
    span = None if length is None else span_of(length)
    try:
        by = call.identity.name
        return call.service.delayed.pause(queue, why=why, by=by, for_=span, **part)
    except QueryError as error:
        raise Problem(404, str(error)) from None


def resume(call: Call, queue: str, **part: str | None) -> bool:
    """Resume a queue, or a part of it, for the caller; returns whether it was paused."""
    call.identity.require_whole()
    call.identity.check_queue(queue)
    call.note("resume", queue)
    return call.service.delayed.resume(queue, **part)


def _part(given: Part) -> dict[str, str | None]:
    return {"task": given.task, "tenant": given.tenant}


def _state(call: Call, part: Part) -> dict[str, Any]:
    found = [info_data(each) for each in call.service.delayed.pauses(call.queue)]
    asked = _part(part)
    own = [each for each in found if asked.items() <= each.items()]
    facts = own[0] if own else dict.fromkeys(("since", "until", "by", "why"))
    parts = [each for each in found if each["task"] or each["tenant"]]
    return {**facts, **asked, "queue": call.queue, "paused": bool(own), "parts": parts}
