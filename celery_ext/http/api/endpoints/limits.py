"""Limits: how much there is, in use, and what waits for it."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from celery_ext.control.limit_usage import Standing
from celery_ext.control.limits import KeyInfo, info_data, keys_page, limit, limits, names_of, stand
from celery_ext.http.problems import Problem
from celery_ext.tasks.task_info import TaskInfo
from kombu_delayed.inspection.lookup import lookup_by_id

from .. import cursors
from ..limit_models import KeysQuery, LimitDetail, Limits, LimitsQuery, QueueLimits
from ..operations import Call, Json, Operation
from ..status import state_of

#: How old a reading may be.
SECONDS = 2.0


def standing_of(call: Call, queue: str) -> Standing:
    """How it stands at a gate, for all or for the caller's tenants; read once for all callers."""
    delayed, tenants = call.service.delayed, call.identity.tenants
    return call.service.recent.get(
        ("standing", queue, tenants), SECONDS, lambda: stand(delayed, queue, tenants)
    )


async def list_limits(call: Call) -> Response:
    return Json(await call.run(_list, call, call.query))


def _list(call: Call, query: LimitsQuery) -> dict[str, Any]:
    place = tuple(cursors.read(query.cursor, str, str)) if query.cursor else ("", "")
    found: list[dict[str, Any]] = []
    for queue in sorted(call.service.queues(call.identity, query.queue)):
        if queue < place[0]:
            continue
        for info in limits(call.service.delayed, standing_of(call, queue)):
            if (info.queue, info.name) <= place:
                continue
            if len(found) == query.limit:
                last = found[-1]
                return {"limits": found, "next": cursors.write(last["queue"], last["name"])}
            found.append(info_data(info))
    return {"limits": found, "next": None}


async def get_queue_limits(call: Call) -> Response:
    return Json(await call.run(_of_queue, call, _queue(call)))


def _queue(call: Call) -> str:
    queue = str(call.request.path_params["queue"])
    call.identity.check_queue(queue)
    return queue


def _of_queue(call: Call, queue: str) -> dict[str, Any]:
    standing, delayed = standing_of(call, queue), call.service.delayed
    own = sum(each.waiting for each in standing.tenants.values())
    return {
        "queue": queue,
        "turns_by": standing.declarations.turns_by or None,
        "waiting": own if standing.tenants_only else delayed.store.waiting(queue),
        "waiting_for_turn": standing.turn.waiting,
        "is_complete": standing.is_complete,
        "limits": [info_data(info) for info in limits(delayed, standing)],
    }


async def get_limit(call: Call) -> Response:
    return Json(await call.run(_one, call, _queue(call), call.query))


def _one(call: Call, queue: str, query: KeysQuery) -> dict[str, Any]:
    delayed, standing = call.service.delayed, standing_of(call, queue)
    name = str(call.request.path_params["name"])
    info = limit(delayed, standing, name)
    if info is None:
        raise Problem(404, f"queue {queue!r} has no limit {name!r}"[:300])
    place = cursors.read(query.cursor, int, int, str) if query.cursor else None
    page: list[KeyInfo] = []
    following = None
    if info.keys is not None:
        after = None if place is None else (place[0], place[1], place[2])
        page, following = keys_page(delayed, standing, name, query.limit, query.key or "", after)
    return {
        **info_data(info),
        "page": [info_data(each) for each in page],
        "tasks": [state_of(call.service, each) for each in waiting_tasks(call, standing, name)],
        "next": cursors.write(*following) if following else None,
    }


def waiting_tasks(call: Call, standing: Standing, name: str) -> list[TaskInfo]:
    """Some tasks that wait for a limit, of those that the caller sees."""
    store = call.service.delayed.store
    found: list[TaskInfo] = []
    for member in standing.first_ids(store, names_of(standing, name)):
        for each in lookup_by_id(store, standing.queue, member.partition("\x1f")[0]):
            info = TaskInfo.of(each)
            if info.state == "waiting" and call.identity.sees(info.queue, info.tenant):
                found.append(info)
                break
    return found


OPERATIONS = [
    Operation(
        "GET",
        "/v1/limits",
        list_limits,
        "read",
        "Limits: how much there is, in use, and waits for it; by queue and name.",
        "limits",
        query=LimitsQuery,
        answers={200: Limits},
    ),
    Operation(
        "GET",
        "/v1/queues/{queue}/limits",
        get_queue_limits,
        "read",
        "The limits of a queue, and how much waits for its turn.",
        "limits",
        answers={200: QueueLimits},
    ),
    Operation(
        "GET",
        "/v1/queues/{queue}/limits/{name}",
        get_limit,
        "read",
        "A limit with its keys, and who waits for it.",
        "limits",
        query=KeysQuery,
        answers={200: LimitDetail},
        problems=(404,),
    ),
]
