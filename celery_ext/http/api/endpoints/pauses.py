"""Pause and resume queues."""

from __future__ import annotations

from typing import Any

from celery_ext.control.pauses import QueuePause
from celery_ext.errors import QueryError
from celery_ext.http.problems import Problem
from celery_ext.tasks.times import info_data

from ..fields import span_of
from ..models import NewPause, PauseState
from ..operations import Call, Operations

operations = Operations("queues", "/v1/queues/{queue}")

_NONE = {"since": None, "until": None, "by": None, "why": None}


@operations.add("GET", "/pause", "read", PauseState)
def get_pause(call: Call) -> dict[str, Any]:
    """Whether a queue is paused, by whom and why."""
    call.identity.require_whole()
    found = call.service.delayed.pauses(call.queue)
    return _state(call.queue, found[0] if found else None)


@operations.add("POST", "/pause", "admin", PauseState, body=NewPause, problems=(404,))
def pause_queue(call: Call) -> dict[str, Any]:
    """Pause a queue: no worker begins a task of it."""
    return _state(call.queue, pause(call, call.queue, call.body.why, call.body.length))


@operations.add("POST", "/resume", "admin", PauseState)
def resume_queue(call: Call) -> dict[str, Any]:
    """Resume a paused queue."""
    resume(call, call.queue)
    return _state(call.queue, None)


def pause(call: Call, queue: str, why: str, length: str | float | None) -> QueuePause:
    """Pause a queue for who calls. Raises a Problem for one that there is not."""
    call.identity.require_whole()
    call.identity.check_queue(queue)
    call.note("pause", queue)
    span = None if length is None else span_of(length)
    if span is not None and not span:
        raise Problem.of_field("for", "give more than 0 seconds")
    try:
        return call.service.delayed.pause(queue, why=why, by=call.identity.name, for_=span)
    except QueryError as error:
        raise Problem(404, str(error)) from None


def resume(call: Call, queue: str) -> bool:
    """Resume a queue for who calls; returns whether it was paused."""
    call.identity.require_whole()
    call.identity.check_queue(queue)
    call.note("resume", queue)
    return call.service.delayed.resume(queue)


def _state(queue: str, found: QueuePause | None) -> dict[str, Any]:
    told = _NONE if found is None else info_data(found)
    return {**told, "queue": queue, "paused": found is not None}
