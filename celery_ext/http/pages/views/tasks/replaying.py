"""Replays or drops dead letters, after a preview."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from starlette.responses import Response

from celery_ext.errors import QueryError
from celery_ext.http.api.endpoints.bulk_change import redirect_to
from celery_ext.http.api.endpoints.dead_letters import letters_page, own_letters
from celery_ext.http.problems import Problem
from celery_ext.tasks.dead_task import DeadTask
from celery_ext.tasks.times import to_ms

from ... import choosing
from ...choosing import NO_ERRORS, Chosen
from ...visit import Action, Form, Visit
from ..results.dead import filter_of, letter_name, query_of
from ..results.failures import origin_of

#: How many letters a preview shows in detail.
SAMPLE_SIZE = 20

VERBS = {"replay": "Replay", "purge": "Drop for good"}


def _choose(visit: Visit, form: Form) -> tuple[Chosen[DeadTask], bool]:
    def search(limit: int, cursor: str | None) -> tuple[list[tuple[str, DeadTask]], str | None]:
        return letters_page(visit, query_of(filter_of(form), limit=limit, cursor=cursor))

    def find(queue: str, ids: Sequence[str]) -> Iterator[tuple[str, list[DeadTask]]]:
        visit.identity.check_queue(queue)
        return own_letters(visit, queue, [*ids])

    return choosing.choose(form, search, find)


def preview(visit: Visit, form: Form, wrong: Mapping[str, str] = NO_ERRORS) -> Response:
    form.verb(VERBS)
    chosen, is_all = _choose(visit, form)
    letters = [each for part in chosen.values() for each in part]
    back, given = origin_of(form, "/dead", filter_of(form))
    kinds = Counter((each.queue, each.info.task) for each in letters)
    shown = {
        **choosing.preview(form, VERBS, map(letter_name, letters), kinds, is_all),
        "back": back,
        "filter": given,
        "queues": visit.queues() if form.one("verb") == "replay" else [],
        "letters": letters[:SAMPLE_SIZE],
        "wrong": wrong,
    }
    return visit.render("replay.html", shown, 422 if wrong else 200)


def apply(visit: Visit, form: Form) -> Response:
    verb = form.verb(VERBS)
    try:
        change = _change(visit, form, verb)
    except Problem as problem:
        if not problem.errors:
            raise
        return preview(visit, form, dict(problem.errors))
    chosen, _ = _choose(visit, form)
    count = sum(map(len, chosen.values()))
    visit.take(form)
    back, given = origin_of(form, "/dead", filter_of(form))
    goal = form.given(["at", "to_queue"])
    visit.note(f"dead-{verb}", choosing.audited(form, "dead letters", given, goal, count))
    changed = sum(change(*part) for part in choosing.parts(chosen))
    visit.service.cache.forget()
    if back == "/dead":
        given = form.given(["queue"])
    return visit.redirect(
        back, **given, done=verb, count=changed, among=choosing.among(form, count)
    )


def _change(visit: Visit, form: Form, verb: str) -> Callable[[str, list[DeadTask]], int]:
    """The function that changes dead letters of a shard. Raises a Problem for an invalid time."""
    dead = visit.service.delayed.store.dead
    if verb == "purge":
        return lambda shard, tasks: dead.purge(shard, _ids(tasks))
    at, to_queue = form.one("at"), form.one("to_queue")
    if to_queue:
        if at:
            raise Problem.of_field("to_queue", "give either a time or another queue")
        return redirect_to(visit, to_queue).dead
    try:
        due_ms = to_ms("at", at) if at else 0
    except QueryError as error:
        raise Problem.of_field("at", str(error)) from None
    return lambda shard, tasks: dead.replay(shard, _ids(tasks), due_ms)


def _ids(tasks: list[DeadTask]) -> list[str]:
    return [each.letter.id for each in tasks]


ACTIONS = [
    Action("/dead/preview", preview, "admin"),
    Action("/dead/change", apply, "admin"),
]
