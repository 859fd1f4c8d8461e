"""Cancels, moves or runs what was chosen in the backlog, after it was shown what that means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from time import time
from typing import Any

from starlette.responses import Response

from celery_ext.control.moves import NOW, due_at
from celery_ext.control.ready import ReadyTask
from celery_ext.errors import QueryError
from celery_ext.http.api import create_once
from celery_ext.http.api.endpoints.search import search_page
from celery_ext.http.api.fields import span_of
from celery_ext.http.api.ready import ready_of
from celery_ext.http.api.status import delayed_infos
from celery_ext.http.problems import Problem
from celery_ext.tasks.task_info import TaskInfo
from celery_ext.tasks.times import LATEST_MS, to_ms

from .. import choosing
from ..choosing import Chosen
from ..visit import Action, Form, Visit
from .backlog import filter_of, name_of, search_of

#: Tasks of which a preview shows what would become.
SAMPLE_SIZE = 20

VERBS = {"cancel": "Cancel", "move": "Move", "run-now": "Run now"}


@dataclass(frozen=True)
class Target:
    """Where tasks are moved to: by so much, or all to one time in ms. Neither: not known yet."""

    by: timedelta | None = None
    to_ms: int | None = None

    def due_ms(self, info: TaskInfo) -> int:
        if self.to_ms is not None:
            return self.to_ms
        since_ms = int(time() * 1000) if info.state == "ready" else info.due_ms or 0
        moved = since_ms + (self.by or timedelta()) // timedelta(milliseconds=1)
        return min(max(moved, 0), LATEST_MS)


def target_of(form: Form) -> Target | None:
    """What a form says of where to move; None: nothing yet. Raises a Problem."""
    how, by, to = form.one("how"), form.one("by"), form.one("to")
    if how == "to" and to:
        try:
            return Target(to_ms=min(max(to_ms("to", to), 0), LATEST_MS))
        except QueryError:
            raise Problem.of_field("to", f"{to[:40]!r} is not a time") from None
    if how in ("later", "earlier") and by:
        try:
            length = span_of(by)
        except ValueError as error:
            raise Problem.of_field("by", str(error)) from None
        return Target(by=length if how == "later" else -length)
    return None


def _choose(visit: Visit, form: Form) -> tuple[Chosen[TaskInfo], bool]:
    def search(limit: int, cursor: str | None) -> tuple[list[tuple[str, TaskInfo]], str | None]:
        return search_page(visit, search_of(filter_of(form), limit=limit, cursor=cursor))

    def find(queue: str, id: str) -> Iterable[tuple[str, list[TaskInfo]]]:
        return delayed_infos(visit.service, visit.identity, id, queue).items()

    return choosing.choose(form, search, find)


def _ready(visit: Visit, form: Form, chosen: Chosen[TaskInfo]) -> list[ReadyTask]:
    """The one task that was chosen, if it is ready: those of a search are delayed."""
    names = [*choosing.ticked(form)]
    if chosen or form.one("all") or len(names) != 1:
        return []
    queue, id = names[0]
    return ready_of(visit.service, visit.identity, id, queue)


def preview(visit: Visit, form: Form) -> Response:
    verb, wrong, target = form.verb(VERBS), {}, None
    if verb == "move":
        try:
            target = target_of(form)
        except Problem as problem:
            wrong = dict(problem.errors)
    chosen, is_all = _choose(visit, form)
    infos = sorted((each for part in chosen.values() for each in part), key=_due_ms)
    infos += [each.info for each in _ready(visit, form, chosen)]
    kinds = Counter((each.queue, each.task) for each in infos)
    shown = {
        **choosing.preview(form, VERBS, map(name_of, infos), kinds, is_all),
        "filter": filter_of(form),
        "infos": infos[:SAMPLE_SIZE],
        "target": target,
        "wrong": wrong,
        "kind_count": len(kinds),
        "due": (infos[0].due_ms, infos[-1].due_ms) if chosen else None,
        "is_ready": bool(infos) and not chosen,
    }
    return visit.render("change.html", shown, 422 if wrong else 200)


def apply(visit: Visit, form: Form) -> Response:
    verb = form.verb(VERBS)
    target = target_of(form) if verb == "move" else None
    if verb == "move" and target is None:
        raise Problem.of_field("by", "say how far, or to what time")
    chosen, _ = _choose(visit, form)
    ready = _ready(visit, form, chosen)
    count = sum(map(len, chosen.values())) + len(ready)
    visit.take(form)
    given = filter_of(form)
    visit.note(verb, choosing.audited(form, "tasks", given, count))
    change = _CHANGES[verb]
    changed = sum(change(visit, shard, infos, target) for shard, infos in choosing.parts(chosen))
    changed += sum(_change_ready(visit, verb, each, target) for each in ready)
    visit.service.cache.forget()
    return visit.redirect("/backlog", **given, done=verb, count=changed, of=count)


def _due_ms(info: TaskInfo) -> int:
    return info.due_ms or 0


def _cancel(visit: Visit, shard: str, infos: list[TaskInfo], target: Any) -> int:
    delayed = visit.service.delayed
    dropped = delayed.moves.cancel(shard, infos)
    create_once.forget(delayed.store, dropped)
    return len(dropped)


def _run_now(visit: Visit, shard: str, infos: list[TaskInfo], target: Any) -> int:
    return visit.service.delayed.moves.run_now(shard, infos)


def _move(visit: Visit, shard: str, infos: list[TaskInfo], target: Target) -> int:
    dues = [due_at(target.due_ms(each)) for each in infos]
    return visit.service.delayed.moves.reschedule(shard, infos, dues)


def _change_ready(visit: Visit, verb: str, task: ReadyTask, target: Target | None) -> int:
    moves = visit.service.delayed.moves
    if verb != "cancel":
        due = NOW if target is None else due_at(target.due_ms(task.info))
        return int(moves.postpone(task, due))
    gone = moves.cancel_ready([task])
    create_once.forget(visit.service.delayed.store, gone)
    return len(gone)


_CHANGES: dict[str, Callable[[Visit, str, list[TaskInfo], Any], int]] = {
    "cancel": _cancel,
    "move": _move,
    "run-now": _run_now,
}

ACTIONS = [
    Action("/backlog/preview", preview, "schedule"),
    Action("/backlog/change", apply, "schedule"),
]
