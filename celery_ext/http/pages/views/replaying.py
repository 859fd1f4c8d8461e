"""Replays or drops dead letters, after it was shown which."""

from __future__ import annotations

from collections import Counter

from starlette.responses import Response

from celery_ext.http.api import cursors
from celery_ext.http.api.endpoints.dead_letters import letters_page
from celery_ext.http.auth.sessions import new_secret
from celery_ext.tasks.dead_task import DeadTask
from kombu_delayed.store.store import CALL_LIMIT

from ..visit import Action, Form, Visit
from .dead import FIELDS, filter_of, letter_name, query_of

#: Letters that one form changes, and those of which a preview shows more.
MOST, SAMPLE_SIZE = 10_000, 20

#: Pages of letters that one form looks through.
LOOKS = 20

VERBS = {"replay": "Replay", "purge": "Drop for good"}

Chosen = dict[str, list[DeadTask]]


def choose(visit: Visit, form: Form) -> tuple[Chosen, bool]:
    """The letters that a form means, by shard, and whether these are all of them."""
    if form.one("all"):
        return _choose_all(visit, form)
    chosen: Chosen = {}
    store = visit.service.delayed.store
    for name in form.all("chosen")[:MOST]:
        queue, id = cursors.read(name, str, str)
        visit.identity.check_queue(queue)
        for shard in store.shards.all(queue):
            for letter in store.dead.letters(shard, [id]):
                found = DeadTask(queue, letter)
                if visit.identity.sees(queue, found.info.tenant):
                    chosen.setdefault(shard, []).append(found)
    return chosen, True


def _choose_all(visit: Visit, form: Form) -> tuple[Chosen, bool]:
    chosen: Chosen = {}
    cursor, count = None, 0
    for _ in range(LOOKS):
        limit = min(1_000, MOST - count)
        found, cursor = letters_page(visit, query_of(filter_of(form), limit=limit, cursor=cursor))
        for shard, task in found:
            chosen.setdefault(shard, []).append(task)
        count += len(found)
        if cursor is None or count >= MOST:
            break
    return chosen, cursor is None


def preview(visit: Visit, form: Form) -> Response:
    """What a form would change."""
    verb = form.verb(VERBS)
    chosen, is_all = choose(visit, form)
    letters = [each for part in chosen.values() for each in part]
    shown = {
        "verb": verb,
        "word": VERBS[verb],
        "form": form,
        "fields": FIELDS,
        "filter": filter_of(form),
        "names": [letter_name(each) for each in letters] if not form.one("all") else [],
        "letters": letters[:SAMPLE_SIZE],
        "count": len(letters),
        "is_all": is_all,
        "most": MOST,
        "kinds": Counter((each.queue, each.info.task) for each in letters).most_common(10),
        "once": new_secret(),
    }
    return visit.render("replay.html", shown)


def apply(visit: Visit, form: Form) -> Response:
    """Change it."""
    verb = form.verb(VERBS)
    chosen, _ = choose(visit, form)
    count = sum(map(len, chosen.values()))
    visit.take(form)
    visit.note(f"dead-{verb}", _target(form, count))
    store = visit.service.delayed.store
    change = store.dead.replay if verb == "replay" else store.dead.purge
    changed = sum(
        change(shard, [each.letter.id for each in letters[at : at + CALL_LIMIT]])
        for shard, letters in chosen.items()
        for at in range(0, len(letters), CALL_LIMIT)
    )
    visit.recent.forget()
    queue = filter_of(form).get("queue")
    return visit.redirect("/dead", queue=queue, done=verb, count=changed, of=count)


def _target(form: Form, count: int) -> str:
    """For the audit log."""
    if form.one("all"):
        return f"{count} dead letters with {filter_of(form)}"
    return ",".join(cursors.read(name, str, str)[1] for name in form.all("chosen")[:MOST])


ACTIONS = [
    Action("/dead/preview", preview, "admin"),
    Action("/dead/change", apply, "admin"),
]
