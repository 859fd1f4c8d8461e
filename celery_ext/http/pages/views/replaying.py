"""Replays or drops dead letters, after it was shown which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from starlette.responses import Response

from celery_ext.http.api.endpoints.dead_letters import letters_page, own_letters
from celery_ext.tasks.dead_task import DeadTask

from .. import choosing
from ..choosing import Chosen
from ..visit import Action, Form, Visit
from .dead import filter_of, letter_name, query_of

#: Letters of which a preview shows more.
SAMPLE_SIZE = 20

VERBS = {"replay": "Replay", "purge": "Drop for good"}


def _choose(visit: Visit, form: Form) -> tuple[Chosen[DeadTask], bool]:
    def search(limit: int, cursor: str | None) -> tuple[list[tuple[str, DeadTask]], str | None]:
        return letters_page(visit, query_of(filter_of(form), limit=limit, cursor=cursor))

    def find(queue: str, id: str) -> Iterator[tuple[str, list[DeadTask]]]:
        visit.identity.check_queue(queue)
        return own_letters(visit, queue, [id])

    return choosing.choose(form, search, find)


def preview(visit: Visit, form: Form) -> Response:
    form.verb(VERBS)
    chosen, is_all = _choose(visit, form)
    letters = [each for part in chosen.values() for each in part]
    kinds = Counter((each.queue, each.info.task) for each in letters)
    shown = {
        **choosing.preview(form, VERBS, map(letter_name, letters), kinds, is_all),
        "filter": filter_of(form),
        "letters": letters[:SAMPLE_SIZE],
    }
    return visit.render("replay.html", shown)


def apply(visit: Visit, form: Form) -> Response:
    verb = form.verb(VERBS)
    chosen, _ = _choose(visit, form)
    count = sum(map(len, chosen.values()))
    visit.take(form)
    given = filter_of(form)
    visit.note(f"dead-{verb}", choosing.audited(form, "dead letters", given, count))
    store = visit.service.delayed.store
    change = store.dead.replay if verb == "replay" else store.dead.purge
    changed = sum(
        change(shard, [each.letter.id for each in part]) for shard, part in choosing.parts(chosen)
    )
    visit.service.cache.forget()
    return visit.redirect("/dead", queue=given.get("queue"), done=verb, count=changed, of=count)


ACTIONS = [
    Action("/dead/preview", preview, "admin"),
    Action("/dead/change", apply, "admin"),
]
