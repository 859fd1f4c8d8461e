"""Cancels, moves or runs the waiting tasks that were chosen in a list, after a preview."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from time import time

from starlette.responses import Response

from celery_ext.control.changes.change_many import OnDelayed, OnReady
from celery_ext.control.changes.moves import NOW, Due, due_at
from celery_ext.control.changes.ready import ReadyTask
from celery_ext.errors import QueryError
from celery_ext.http.api.endpoints.bulk_change import near, redirect_to
from celery_ext.http.api.endpoints.lists.by_state import ready_page
from celery_ext.http.api.endpoints.lists.search import search_page
from celery_ext.http.api.fields import span_of
from celery_ext.http.api.operations import validated
from celery_ext.http.api.ready import ready_of
from celery_ext.http.api.status import delayed_infos
from celery_ext.http.problems import Problem
from celery_ext.tasks.task_info import TaskInfo
from celery_ext.tasks.times import LATEST_MS, to_ms

from ... import choosing
from ...choosing import MOST, NO_ERRORS, Chosen
from ...visit import Action, Form, Visit
from ..results.failures import Asked, matching, origin_of
from .backlog import filter_of, name_of, search_of

#: For how many tasks a preview shows the result.
SAMPLE_SIZE = 20

VERBS = {"cancel": "Cancel", "move": "Move", "run-now": "Run now", "redirect": "Move"}

#: The fields of a form that say where tasks go.
GOALS = {"move": ["how", "by", "to"], "redirect": ["to_queue"]}


@dataclass(frozen=True)
class Target:
    """Where tasks are moved to: by a length of time, or all to one time in ms."""

    by: timedelta | None = None
    to_ms: int | None = None

    def due_ms(self, info: TaskInfo) -> int:
        if self.to_ms is not None:
            return self.to_ms
        since_ms = int(time() * 1000) if info.state == "ready" else info.due_ms or 0
        moved = since_ms + (self.by or timedelta()) // timedelta(milliseconds=1)
        return min(max(moved, 0), LATEST_MS)


def target_of(form: Form) -> Target | None:
    """Read from a form where to move tasks; None: it is not filled in yet. Raises a Problem."""
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
    if how:
        raise Problem.of_field("to" if how == "to" else "by", "choose by how long, or to what time")
    return None


@dataclass(frozen=True)
class Choice:
    """The tasks that a form selects, by shard, and whether these are all that match."""

    delayed: Chosen[TaskInfo]
    ready: Chosen[ReadyTask]
    is_all: bool

    @property
    def infos(self) -> list[TaskInfo]:
        """Delayed tasks by due time, or ready ones as they were found."""
        delayed = (each for part in self.delayed.values() for each in part)
        ready = (each.info for part in self.ready.values() for each in part)
        return [*sorted(delayed, key=lambda info: info.due_ms or 0), *ready]


def _origin(form: Form) -> tuple[str, dict[str, str]]:
    return origin_of(form, "/backlog", filter_of(form))


def _choose(visit: Visit, form: Form) -> Choice:
    if form.one("state") == "ready":
        return Choice({}, *choosing.choose(form, _search_ready(visit, form), _ready(visit)))
    find = _delayed(visit)
    if form.one("of") and form.one("all"):
        rows, is_partial = matching(visit, validated(Asked, _origin(form)[1]))
        names = [(row.history.queue, row.history.id) for row in rows[:MOST]]
        return Choice(choosing.by_name(names, find), {}, not is_partial and len(rows) <= MOST)

    def search(limit: int, cursor: str | None) -> tuple[list[tuple[str, TaskInfo]], str | None]:
        return search_page(visit, search_of(filter_of(form), limit=limit, cursor=cursor))

    delayed, is_all = choosing.choose(form, search, find)
    names = [*choosing.ticked(form)]
    if delayed or form.one("all") or len(names) != 1:
        return Choice(delayed, {}, is_all)
    return Choice({}, choosing.by_name(names, _ready(visit)), True)  # one task, on its own page


def _delayed(visit: Visit) -> choosing.Find[TaskInfo]:
    def find(queue: str, ids: Sequence[str]) -> Iterator[tuple[str, list[TaskInfo]]]:
        for id in ids:
            yield from delayed_infos(visit.service, visit.identity, id, queue).items()

    return find


def _ready(visit: Visit) -> choosing.Find[ReadyTask]:
    def find(queue: str, ids: Sequence[str]) -> Iterator[tuple[str, list[ReadyTask]]]:
        for each in ready_of(visit.service, visit.identity, ids, queue):
            yield each.shard, [each]

    return find


def _search_ready(visit: Visit, form: Form) -> choosing.Search[ReadyTask]:
    search = search_of(filter_of(form))

    def find(limit: int, cursor: str | None) -> tuple[list[tuple[str, ReadyTask]], str | None]:
        found, following = ready_page(visit, search, limit, cursor)
        return [(each.shard, each) for each in found], following

    return find


def preview(visit: Visit, form: Form, wrong: Mapping[str, str] = NO_ERRORS) -> Response:
    verb, target = form.verb(VERBS), None
    if verb == "move" and not wrong:
        try:
            target = target_of(form)
        except Problem as problem:
            wrong = dict(problem.errors)
    choice = _choose(visit, form)
    infos, (back, given) = choice.infos, _origin(form)
    kinds = Counter((each.queue, each.task) for each in infos)
    shown = {
        **choosing.preview(form, VERBS, map(name_of, infos), kinds, choice.is_all),
        "back": back,
        "filter": given,
        "infos": infos[:SAMPLE_SIZE],
        "target": target,
        "shown_move": _move_of(form),
        "wrong": wrong,
        "queues": visit.queues() if verb == "redirect" else [],
        "kind_count": len(kinds),
        "due": (infos[0].due_ms, infos[-1].due_ms) if choice.delayed else None,
        "is_ready": bool(choice.ready),
    }
    return visit.render("change.html", shown, 422 if wrong else 200)


def apply(visit: Visit, form: Form) -> Response:
    verb, target = form.verb(VERBS), None
    try:
        if verb == "move" and (target := target_of(form)) is None:
            return preview(visit, form)
        on_delayed, on_ready = _changes(visit, form, verb, target)
    except Problem as problem:
        if not problem.errors:
            raise
        return preview(visit, form, dict(problem.errors))
    if form.one("shown") not in ("", _move_of(form)):
        return preview(visit, form)
    choice, (back, given) = _choose(visit, form), _origin(form)
    count = len(choice.infos)
    visit.take(form)
    goal = form.given(GOALS.get(verb, []))
    visit.note(verb, choosing.audited(form, "tasks", given, goal, count))
    changed = sum(on_delayed(*part) for part in choosing.parts(choice.delayed))
    for tasks in choice.ready.values():
        # The last tasks first, so that the places of the others do not change.
        changed += sum(on_ready(part) for _, _, part in reversed([*near(tasks)]))
    visit.service.cache.forget()
    return visit.redirect(
        back, **given, done=verb, count=changed, among=choosing.among(form, count)
    )


def _move_of(form: Form) -> str:
    """Where a form moves tasks, as text to compare with what its preview has shown."""
    return " ".join(map(form.one, ("how", "by", "to")))


def _changes(
    visit: Visit, form: Form, verb: str, target: Target | None
) -> tuple[OnDelayed, OnReady]:
    """Functions that change delayed tasks of a shard, and ready tasks that are near each other."""
    moves = visit.service.moves

    def due_of(info: TaskInfo) -> Due:
        return NOW if target is None else due_at(target.due_ms(info))

    if verb == "cancel":
        return (
            lambda shard, infos: len(moves.cancel(shard, infos)),
            lambda tasks: len(moves.cancel_ready(tasks)),
        )
    if verb == "redirect":
        to = redirect_to(visit, form.one("to_queue"))
        return to.delayed, to.ready
    return (
        lambda shard, infos: moves.reschedule(shard, infos, map(due_of, infos)),
        lambda tasks: moves.postpone_all(tasks, [due_of(each.info) for each in tasks]),
    )


ACTIONS = [
    Action("/backlog/preview", preview, "schedule"),
    Action("/backlog/change", apply, "schedule"),
]
