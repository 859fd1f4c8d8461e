"""Cancels, moves and replays what matches a filter, up to a limit, or shows what would change."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StringConstraints, model_validator

from celery_ext.control.changes.change_many import IsDone, OnDelayed, OnReady, Outcome
from celery_ext.control.changes.moves import due_at
from celery_ext.control.changes.ready import ReadyTask
from celery_ext.control.changes.redirect import Redirect
from celery_ext.errors import QueryError
from celery_ext.tasks.task_info import TaskInfo
from kombu_delayed.inspection.gate_usage import server_ms
from kombu_delayed.message.envelope import eta_to_ms
from kombu_delayed.store.calls.shards import queue_of
from kombu_delayed.store.store import CALL_LIMIT

from ...problems import Problem
from .. import cursors
from ..fields import Cursor, Name, Timed
from ..models import DeadQuery, Filter, Search, TaskState
from ..operations import Call, Operations
from ..status import state_of
from .dead_letters import letters_page
from .lists.by_state import ready_page
from .lists.search import search_page

_DRY_RUN = Field(False, description="Only show what would be changed.")
_MOST = Field(1_000, ge=1, le=10_000, description="Maximum number of changes.")

#: How long one request lasts.
SECONDS = 10.0

#: The largest distance in a list of the ready tasks that one call changes.
SPAN = 500

operations = Operations("tasks", "/v1/bulk", is_search=True)


class BulkChoice(Filter):
    """The tasks to change; at least one criterion is needed."""

    state: Literal["scheduled", "ready"] = "scheduled"
    dry_run: bool = _DRY_RUN
    limit: int = _MOST

    @model_validator(mode="after")
    def _criterion(self) -> BulkChoice:
        if not self.criteria:
            raise ValueError(
                "queue: give a queue, a task (* for any), a tenant, where or due times"
            )
        for name in ("due_after", "due_before"):
            if self.state == "ready" and getattr(self, name) is not None:
                raise ValueError(f"{name}: only delayed tasks are chosen by due time")
        return self


class BulkMove(BulkChoice, Timed):
    """The tasks to move, and their due time."""


class BulkRedirect(BulkChoice):
    """The tasks to move to another queue, and its name."""

    to_queue: Name


class BulkReplay(Timed):
    """The dead letters to replay, now or at a time; at least one criterion is needed."""

    to_queue: Name | None = Field(
        None, description="Another queue to replay them in, now; null: each in its own."
    )

    queue: Name | None = None
    task: Name | None = None
    reason: Annotated[str, StringConstraints(min_length=1, max_length=2_000)] | None = Field(
        None, description="A pattern: * stands for any text, ? for any character."
    )
    tenant: Name | None = None
    cursor: Cursor | None = None
    dry_run: bool = _DRY_RUN
    limit: int = _MOST

    @model_validator(mode="after")
    def _criterion(self) -> BulkReplay:
        if not (self.queue or self.task or self.reason or self.tenant):
            raise ValueError("queue: give a queue, a task (* for any), a reason or a tenant")
        if self.to_queue is not None and self.due_at is not None:
            raise ValueError("to_queue: letters are replayed in another queue now, not at a time")
        return self


class BulkOutcome(BaseModel):
    """The changed tasks, or with `dry_run` those that would be changed."""

    matched: int
    changed: int
    dry_run: bool
    queues: dict[str, int] = Field(description="How many matched in each queue.")
    sample: list[TaskState] = Field(description="The first ten, as they were.")
    next: str | None = Field(description="The cursor for the next request; null: the end.")


@dataclass
class _Outcome:
    call: Call
    choice: BulkChoice | BulkReplay
    cursor: str | None
    total: Outcome = field(default_factory=Outcome)

    def add(self, shard: str, infos: list[TaskInfo], change: Callable[[], int]) -> int:
        """Count some tasks, and change them unless it is a dry run."""
        changed = 0 if self.choice.dry_run else change()
        if infos:
            self.total.add(queue_of(shard), infos, changed)
        return changed

    def turns(self) -> Iterator[int]:
        """How many tasks to look for next, as long as there are more and there is time."""
        until = time.monotonic() + SECONDS
        yield min(self.choice.limit, CALL_LIMIT)
        while self.cursor is not None and self.total.matched < self.choice.limit:
            if time.monotonic() > until:
                return
            yield min(self.choice.limit - self.total.matched, CALL_LIMIT)

    def answer(self, action: str) -> dict[str, Any]:
        given = self.choice.model_dump(exclude_none=True, exclude={"cursor"})
        self.call.note(action, f"{self.total.changed} of {self.total.matched} with {given}")
        shown = self.total.sample if self.call.identity.has("read") else []
        return {
            **vars(self.total),
            "dry_run": self.choice.dry_run,
            "sample": [state_of(self.call.service, info) for info in shown],
            "next": self.cursor,
        }


@operations.add("POST", "/cancel", "schedule", BulkOutcome, body=BulkChoice)
def cancel_tasks(call: Call) -> dict[str, Any]:
    """Cancel the delayed or ready tasks that match a filter, or preview it with `dry_run`."""
    moves = call.service.moves
    return _change(
        call,
        lambda shard, infos: len(moves.cancel(shard, infos)),
        lambda tasks: len(moves.cancel_ready(tasks)),
    ).answer("bulk-cancel")


@operations.add("POST", "/reschedule", "schedule", BulkOutcome, body=BulkMove)
def reschedule_tasks(call: Call) -> dict[str, Any]:
    """Give all tasks that match a filter one due time, or preview it with `dry_run`."""
    choice: BulkMove = call.body
    at = choice.due_at
    if at is None:
        raise Problem.of_field("due", "give due or delay")
    if choice.state == "ready" and at <= datetime.now(timezone.utc):
        raise Problem.of_field("due", "ready tasks can only be moved to a later time")
    if choice.cursor is not None and choice.delay is not None:
        # Each request would find the tasks that the one before has moved, and move them again.
        raise Problem.of_field("delay", "to continue from a cursor, give due instead")
    due_ms, moves = eta_to_ms(at), call.service.moves
    due = due_at(due_ms)
    return _change(
        call,
        lambda shard, infos: moves.reschedule(shard, infos, [due] * len(infos)),
        lambda tasks: moves.postpone_all(tasks, [due] * len(tasks)),
        lambda info: info.due_ms == due_ms,
    ).answer("bulk-reschedule")


@operations.add("POST", "/redirect", "schedule", BulkOutcome, body=BulkRedirect)
def redirect_tasks(call: Call) -> dict[str, Any]:
    """Move all tasks that match a filter to another queue, or preview it with `dry_run`."""
    to = redirect_to(call, call.body.to_queue)
    return _change(call, to.delayed, to.ready, to.has).answer("bulk-redirect")


def redirect_to(call: Call, queue: str) -> Redirect:
    """The `Redirect` to a queue. Raises a Problem if it is unknown or not for the caller."""
    call.identity.check_queue(queue)
    try:
        return Redirect(call.service.delayed, queue)
    except QueryError as error:
        raise Problem.of_field("to_queue", str(error)) from None


@operations.add("POST", "/replay", "admin", BulkOutcome, body=BulkReplay)
def replay_many(call: Call) -> dict[str, Any]:
    """Replay the dead letters that match a filter, or preview it with `dry_run`."""
    choice: BulkReplay = call.body
    dead, due_ms = call.service.delayed.store.dead, choice.due_ms
    to = None if choice.to_queue is None else redirect_to(call, choice.to_queue)
    cursor, until_ms = _begun(call, choice)
    outcome = _Outcome(call, choice, cursor)
    given = choice.model_dump(include={"queue", "task", "reason"})
    for limit in outcome.turns():
        query = DeadQuery(**given, limit=limit, cursor=outcome.cursor)
        found, outcome.cursor = letters_page(call, query)
        mine = [
            each
            for each in found
            if choice.tenant in (None, each[1].info.tenant) and each[1].letter.at_ms <= until_ms
        ]
        for shard, part in groupby(mine, lambda each: each[0]):
            tasks = [task for _, task in part]
            ids = [task.letter.id for task in tasks]
            replay = partial(dead.replay, shard, ids, due_ms=due_ms)
            if to is not None:
                replay = partial(to.dead, shard, tasks)
            outcome.add(shard, [task.info for task in tasks], replay)
    if outcome.cursor is not None:
        outcome.cursor = cursors.write(outcome.cursor, until_ms)
    return outcome.answer("bulk-replay")


def _begun(call: Call, choice: BulkReplay) -> tuple[str | None, int]:
    """The place in the list of letters, and when the first of these requests began, in ms.

    Letters that are buried later are left out: these requests may have replayed them.
    """
    if choice.cursor is not None:
        cursor, until_ms = cursors.read(choice.cursor, str, int)
        return cursor, until_ms
    shards = call.service.shards(call.identity, choice.queue)
    return None, server_ms(call.service.delayed.store, shards[0]) if shards else 0


def _change(
    call: Call, on_delayed: OnDelayed, on_ready: OnReady, is_done: IsDone = lambda info: False
) -> _Outcome:
    """Change the matching tasks, without those that are done or were changed by an earlier part."""
    choice: BulkChoice = call.body
    outcome = _Outcome(call, choice, choice.cursor)
    for limit in outcome.turns():
        if choice.state == "ready":
            _change_ready(outcome, choice, limit, on_ready, is_done)
        else:
            _change_delayed(outcome, choice, limit, on_delayed, is_done)
    return outcome


def _change_delayed(
    outcome: _Outcome, choice: BulkChoice, limit: int, change: OnDelayed, is_done: IsDone
) -> None:
    search = Search(**choice.criteria, limit=limit, cursor=outcome.cursor)
    found, outcome.cursor = search_page(outcome.call, search)
    for shard, part in groupby(found, lambda each: each[0]):
        infos = [info for _, info in part if not is_done(info)]
        outcome.add(shard, infos, partial(change, shard, infos))


def _change_ready(
    outcome: _Outcome, choice: BulkChoice, limit: int, change: OnReady, is_done: IsDone
) -> None:
    page, outcome.cursor = ready_page(outcome.call, choice, limit, outcome.cursor)
    found = [task for task in page if not is_done(task.info)]
    changed: dict[tuple[str, str], int] = {}
    # The last tasks first, so that the places of the others do not change.
    for shard, step, part in reversed([*near(found)]):
        infos = [task.info for task in part]
        count = outcome.add(shard, infos, partial(change, part))
        changed[shard, str(step)] = changed.get((shard, str(step)), 0) + count
    if outcome.cursor is not None:
        shard, start, number = cursors.read_place(outcome.call, outcome.cursor)
        start = max(start - changed.get((shard, number), 0), 0)
        outcome.cursor = cursors.write_place(outcome.call, shard, start, number)


def near(tasks: Sequence[ReadyTask]) -> Iterator[tuple[str, int, list[ReadyTask]]]:
    """Groups of tasks that are near each other in one list."""

    def place(task: ReadyTask) -> tuple[str, int, int]:
        return task.shard, task.ready.step, task.ready.at // SPAN

    return ((shard, step, [*part]) for (shard, step, _), part in groupby(tasks, place))
