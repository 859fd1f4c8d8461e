"""One task: what it is, and all that is known about its history."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, StringConstraints
from starlette.responses import Response

from celery_ext.http.api.endpoints.dead_letters import own_letters
from celery_ext.http.api.endpoints.tasks import terminate
from celery_ext.http.api.status import EVENTS_LIMIT, State, find, history_of, message_of
from celery_ext.tasks import failures
from celery_ext.tasks.dead_task import DeadTask
from celery_ext.tasks.failures import Failure
from celery_ext.tasks.history import TaskHistory
from celery_ext.tasks.task_info import TaskInfo
from kombu_delayed.inspection import events as streams

from ...visit import Action, Form, Shown, View, Visit, asked
from .. import canvas
from ..results.dead import letter_name
from .backlog import name_of

#: How many events of a queue are searched if the visitor asks for more.
MORE_EVENTS = 20_000

#: Headers that the page shows elsewhere.
SHOWN_ELSEWHERE = frozenset({"argsrepr", "kwargsrepr", failures.HEADER})

#: The texts of events.
WORDS = {
    "scheduled": "Scheduled",
    "rescheduled": "Rescheduled",
    "cancelled": "Cancelled",
    "waiting": "Waits at the gate of its queue",
    "delivered": "Delivered to a worker",
    "acked": "Acknowledged",
    "dropped": "Dropped by a policy",
    "released": "Released",
    "reclaimed": "Reclaimed: its worker's lease had expired",
    "buried": "Became a dead letter",
    "replayed": "Replayed",
    "failed": "Failed",
    "received": "Received by a worker",
    "started": "Started",
    "overran": "Ran over its time limit: its worker's pool cannot end it",
    "succeeded": "Succeeded",
    "retrying": "To be retried",
    "timed out": "Stopped by its time limit",
    "lost": "Lost: its process died",
    "revoked": "Revoked",
    "terminated": "Terminated",
    "expired": "Expired",
    "rejected": "Rejected",
    "ignored": "Ignored",
    "replaced": "Replaced by another task with its id",
    "returned": "Given back to its queue before it began",
}


#: An id or the name of a queue can be any text: the sender of a task chooses it.
_Text = Annotated[str, StringConstraints(max_length=2_000)]


class _Asked(BaseModel):
    id: _Text | None = None
    queue: _Text | None = None
    more: bool = False
    canvas: bool = False


@dataclass(frozen=True)
class Step:
    """Something that has happened to a task, or will."""

    kind: str
    at_ms: int
    worker: str = ""
    due_ms: int | None = None
    reason: str = ""
    traceback: str = ""
    run_ms: int | None = None
    attempt: int | None = None

    @property
    def style(self) -> str:
        return self.kind.replace(" ", "-")

    @property
    def text(self) -> str:
        return WORDS.get(self.kind, self.kind)


def look(visit: Visit) -> Shown:
    query = asked(visit, _Asked)
    shown: dict[str, Any] = {
        "id": query.id,
        "task": None,
        "more": query.more,
        "kin": None,
    }
    if query.id is None:
        return shown
    id: str = query.id
    state = find(visit.service, visit.identity, id, query.queue)
    if state is None:
        return {**shown, "status": 404}
    info, letter = _message(visit, id, state)
    record = history_of(visit.service, visit.identity, id, query.queue)
    ids = canvas.Ids.of(id, info, record)
    attempts = [] if record and record.failure else _attempts(info, letter)
    limit = MORE_EVENTS if query.more else EVENTS_LIMIT
    return {
        **shown,
        "task": state,
        "info": info,
        "headers": _headers(info),
        "ids": ids,
        "kin": canvas.look(visit, ids.root or id, id) if query.canvas else None,
        "steps": _timeline(_event_steps(visit, id, state, limit), record, attempts),
        "failure": record.failure if record else None,
        "limit": limit,
        "keeps_events": bool(visit.service.delayed.store.event_limit),
        "name": name_of(info) if info and info.state in ("delayed", "ready") else "",
        "is_ready": info is not None and info.state == "ready",
        "letter_name": letter_name(letter) if letter else "",
        "may_change": visit.identity.has("schedule"),
        "may_replay": visit.identity.has("admin"),
    }


def _message(visit: Visit, id: str, state: State) -> tuple[TaskInfo | None, DeadTask | None]:
    """The task's message, if the broker has it, and its dead letter."""
    if state["status"] == "dead":
        found = (each for _, part in own_letters(visit, state["queue"], [id]) for each in part)
        letter = next(found, None)
        return (letter.info if letter else None), letter
    if state["status"] not in ("scheduled", "waiting", "running", "retrying"):
        return None, None
    return message_of(visit.service, visit.identity, id, state["queue"]), None


def _attempts(info: TaskInfo | None, letter: DeadTask | None) -> list[Failure]:
    if letter is not None and letter.failures:
        return list(letter.failures)
    return failures.before(info.headers) if info else []


def _headers(info: TaskInfo | None) -> dict[str, str]:
    given = info.headers if info else {}
    return {
        name: str(value)
        for name, value in sorted(given.items())
        if name not in SHOWN_ELSEWHERE and value not in (None, "", [], {})
    }


def _event_steps(visit: Visit, id: str, state: State, limit: int) -> Iterable[Step]:
    store = visit.service.delayed.store
    for shard in store.shards.nearest(state["queue"], id):
        for event in streams.newest(store, shard, limit):
            if event.id == id and visit.identity.sees(event.queue, event.tenant or None):
                yield Step(event.event, event.at_ms, event.worker, event.due_ms, event.reason)


def _timeline(
    events: Iterable[Step], record: TaskHistory | None, attempts: Iterable[Failure]
) -> list[Step]:
    """All steps in order. If workers have recorded a cancellation, its event is left out."""
    steps = [*events, *_failed(attempts)]
    if record is not None:
        own = [*_recorded(record)]
        doubled = {"cancelled"} & {step.kind for step in own}
        steps = [step for step in steps if step.kind not in doubled] + own
    return sorted(steps, key=lambda step: step.at_ms)


def _recorded(record: TaskHistory) -> Iterable[Step]:
    for each in record.steps:
        reason = each.said or each.message
        if each.limit_ms is not None:
            reason = f"The limit is {each.limit_ms / 1000:g} s."
        yield Step(
            each.event,
            each.at_ms,
            each.worker,
            each.next_ms,
            reason,
            each.traceback,
            each.run_ms,
            each.attempt,
        )


def _failed(attempts: Iterable[Failure]) -> Iterable[Step]:
    for each in attempts:
        yield Step("failed", each.at_ms, each.worker, None, each.error, each.traceback)


def on_terminate(visit: Visit, form: Form) -> Response:
    id, queue = form.one("id"), form.one("queue")
    visit.note("terminate", id)
    terminate(visit, id, queue)
    return visit.redirect("/task", id=id, queue=queue, done="terminate")


VIEWS = [View("task", "/task", "", look, seconds=2)]
ACTIONS = [Action("/task/terminate", on_terminate, "admin")]
