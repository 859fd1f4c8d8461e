"""Lists, replays and deletes dead letters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from celery_ext.tasks.dead_task import DeadTask
from kombu_delayed.store.calls.shards import queue_of
from kombu_delayed.store.dead_letters import DeadLetters
from kombu_delayed.store.store import CALL_LIMIT

from .. import cursors
from ..models import Changed, DeadChoice, DeadPage, DeadQuery, ReplayChoice
from ..operations import Call, Operations

#: How many letters one call looks at before it returns what it has found.
LOOKED_AT = 10_000

operations = Operations("dead", "/v1/dead")


@operations.add("GET", "", "read", DeadPage, query=DeadQuery)
def list_dead(call: Call) -> dict[str, Any]:
    """Dead letters, by queue, the oldest first."""
    found, following = letters_page(call, call.query)
    return {"letters": [_state(task) for _, task in found], "next": following}


def letters_page(call: Call, query: DeadQuery) -> tuple[list[tuple[str, DeadTask]], str | None]:
    """A page of dead letters with their shards, and the next cursor; None: no more."""
    store = call.service.delayed.store
    shards = sorted(call.service.shards(call.identity, query.queue))
    place = cursors.read_place(call, query.cursor)
    found: list[tuple[str, DeadTask]] = []
    left = LOOKED_AT
    for name in (each for each in shards if each >= place[0]):
        after = place[1:] if name == place[0] else None
        while page := store.dead.page(name, after, CALL_LIMIT):
            letters = {each.id: each for each in store.dead.letters(name, [id for _, id in page])}
            for after in page:
                left -= 1
                letter = letters.get(after[1])
                task = None if letter is None else DeadTask(queue_of(name), letter)
                if task is not None and is_selected(call, query, task):
                    found.append((name, task))
                if len(found) == query.limit or left == 0:
                    return found, cursors.write_place(call, name, *after)
    return found, None


def is_selected(call: Call, query: DeadQuery, task: DeadTask) -> bool:
    """Returns whether a letter matches and the caller may see it."""
    info = task.info
    named = query.task is None or fnmatchcase(info.task, query.task)
    for_that = query.reason is None or fnmatchcase(info.reason, query.reason)
    return named and for_that and call.identity.sees(task.queue, info.tenant)


def _state(task: DeadTask) -> dict[str, Any]:
    info, letter = task.info, task.letter
    return {
        "id": info.headers.get("id") or letter.id,
        "letter_id": letter.id,
        "task": info.task,
        "queue": task.queue,
        "tenant": info.tenant,
        "reason": letter.reason,
        "consumer": letter.consumer,
        "at": task.at.isoformat(),
        "deliveries": letter.deliveries,
    }


@operations.add("POST", "/replay", "admin", Changed, body=ReplayChoice)
def replay_dead(call: Call) -> dict[str, Any]:
    """Replay dead letters: give them another try."""
    return _changed(call, "dead-replay", partial(DeadLetters.replay, due_ms=call.body.due_ms))


@operations.add("POST", "/purge", "admin", Changed, body=DeadChoice)
def purge_dead(call: Call) -> dict[str, Any]:
    """Delete dead letters."""
    return _changed(call, "dead-purge", DeadLetters.purge)


def _changed(call: Call, action: str, change: Callable[..., int]) -> dict[str, Any]:
    """Change those of the chosen letters that exist and that the caller may see."""
    choice: DeadChoice = call.body
    call.note(action, ",".join(choice.ids))
    ids, dead = list(dict.fromkeys(choice.ids)), call.service.delayed.store.dead
    queues = call.service.queues(call.identity, choice.queue)
    parts = (part for queue in queues for part in own_letters(call, queue, ids))
    return {"changed": sum(change(dead, s, [each.letter.id for each in of]) for s, of in parts)}


def own_letters(call: Call, queue: str, ids: list[str]) -> Iterator[tuple[str, list[DeadTask]]]:
    """The dead letters with some ids that the caller may see, by shard, without empty shards."""
    store = call.service.delayed.store
    for shard in store.shards.all(queue):
        letters = (DeadTask(queue, letter) for letter in store.dead.letters(shard, ids))
        if found := [each for each in letters if call.identity.sees(queue, each.info.tenant)]:
            yield shard, found
