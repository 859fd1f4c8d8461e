"""Dead letters: look at them, give them another try, drop them."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from starlette.responses import Response

from celery_ext.http.problems import Problem
from celery_ext.tasks.dead_task import DeadTask
from kombu_delayed.inspection.backlog import NEVER_MS
from kombu_delayed.store.shards import queue_of
from kombu_delayed.store.store import CALL_LIMIT

from .. import cursors
from ..models import Changed, DeadChoice, DeadPage, DeadQuery, ReplayChoice
from ..operations import Call, Json, Operation

#: Letters that one call looks at before it answers with what it has found.
LOOKED_AT = 10_000


async def list_dead(call: Call) -> Response:
    return Json(await call.run(_list, call, call.query))


def _list(call: Call, query: DeadQuery) -> dict[str, Any]:
    found, following = letters_page(call, query)
    return {"letters": [_state(task) for _, task in found], "next": following}


def letters_page(call: Call, query: DeadQuery) -> tuple[list[tuple[str, DeadTask]], str | None]:
    """Dead letters with their shards, and the cursor of the next ones; None: no more."""
    service, identity = call.service, call.identity
    store = service.delayed.store
    names = service.queues(identity, query.queue)
    shards = sorted(shard for name in names for shard in store.shards.all(name))
    shard, place = _begin(call, query.cursor)
    found: list[tuple[str, DeadTask]] = []
    left = LOOKED_AT
    for name in (each for each in shards if each >= shard):
        after = place if name == shard else None
        while page := store.dead.page(name, after, CALL_LIMIT):
            letters = {each.id: each for each in store.dead.letters(name, [id for _, id in page])}
            for after in page:
                left -= 1
                letter = letters.get(after[1])
                task = None if letter is None else DeadTask(queue_of(name), letter)
                if task is not None and _is_meant(call, query, task):
                    found.append((name, task))
                if len(found) == query.limit or left == 0:
                    return found, cursors.write(name, *after)
    return found, None


def _begin(call: Call, cursor: str | None) -> tuple[str, tuple[int, str] | None]:
    if cursor is None:
        return "", None
    shard, at_ms, id = cursors.read(cursor, str, int, str)
    if not call.identity.sees_queue(queue_of(shard)):
        raise Problem.of_field("cursor", "it is of another queue", 403)
    if not 0 <= at_ms <= NEVER_MS:
        raise Problem.of_field("cursor", "it is not one that this server has given")
    return shard, (at_ms, id)


def _is_meant(call: Call, query: DeadQuery, task: DeadTask) -> bool:
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


async def replay_dead(call: Call) -> Response:
    choice: ReplayChoice = call.body
    call.note("dead-replay", ",".join(choice.ids))
    at = choice.due_at

    def replay(shard: str, ids: list[str]) -> int:
        due_ms = 0 if at is None else int(at.timestamp() * 1000)
        return call.service.delayed.store.dead.replay(shard, ids, due_ms)

    return Json({"changed": await call.run(_change, call, choice, replay)})


async def purge_dead(call: Call) -> Response:
    choice: DeadChoice = call.body
    call.note("dead-purge", ",".join(choice.ids))

    def purge(shard: str, ids: list[str]) -> int:
        return call.service.delayed.store.dead.purge(shard, ids)

    return Json({"changed": await call.run(_change, call, choice, purge)})


def _change(call: Call, choice: DeadChoice, change: Any) -> int:
    """Of each shard those that are there and the caller's."""
    store = call.service.delayed.store
    count = 0
    for name in call.service.queues(call.identity, choice.queue):
        for shard in store.shards.all(name):
            letters = store.dead.letters(shard, list(dict.fromkeys(choice.ids)))
            mine = [
                letter.id
                for letter in letters
                if call.identity.sees(name, DeadTask(name, letter).info.tenant)
            ]
            count += change(shard, mine) if mine else 0
    return count


OPERATIONS = [
    Operation(
        "GET",
        "/v1/dead",
        list_dead,
        "read",
        "Dead letters, by queue, the oldest first.",
        "dead",
        query=DeadQuery,
        answers={200: DeadPage},
    ),
    Operation(
        "POST",
        "/v1/dead/replay",
        replay_dead,
        "admin",
        "Give dead letters another try.",
        "dead",
        body=ReplayChoice,
        answers={200: Changed},
    ),
    Operation(
        "POST",
        "/v1/dead/purge",
        purge_dead,
        "admin",
        "Drop dead letters for good.",
        "dead",
        body=DeadChoice,
        answers={200: Changed},
    ),
]
