"""Limits: their capacity and use, and the tasks and tenants that wait for them."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import islice
from typing import TYPE_CHECKING, Any

from celery_ext.app.queues import Queues
from celery_ext.control.policies.limit_usage import GateUsage
from celery_ext.control.policies.limits import (
    KeyInfo,
    LimitInfo,
    TenantInfo,
    gate_usage,
    keys_page,
    limit,
    limits,
    names_of,
    running,
    tenants,
)
from celery_ext.errors import QueryError
from celery_ext.http.problems import Problem
from celery_ext.tasks.task_info import TaskInfo
from celery_ext.tasks.times import from_ms, info_data
from kombu_delayed.inspection.backlog import NEVER_MS
from kombu_delayed.inspection.gate_usage import known_as, waiting_count
from kombu_delayed.inspection.lookup import lookup_by_id
from kombu_delayed.store.global_limits import GLOBAL

from ....auth.identity import Identity
from ... import cursors
from ...fields import span_of
from ...limit_models import (
    KeysQuery,
    LimitDetail,
    Limits,
    LimitsQuery,
    LimitState,
    NewNumbers,
    OneTenant,
    QueueLimits,
    RunningTasks,
    Tenants,
    TenantsQuery,
    WasReset,
)
from ...operations import Call, Operations
from ...status import state_of

if TYPE_CHECKING:
    from celery_ext.policies import RunningTask

#: How long readings are cached.
SECONDS = 2.0

#: How many running tasks of a queue are read, and the fields of each that are shown unchanged.
RUNNING = 1_000
SHOWN = "queue", "tenant", "worker", "keys", "weights"

#: How many messages wait (negative, so that the busiest tenants are first), tenant, queue.
Place = tuple[int, str, str]

operations = Operations("limits", "/v1")


def usage_of(call: Call, queue: str) -> GateUsage:
    """The usage of a queue's gate, for all or the caller's tenants; cached for all callers."""
    delayed, mine = call.service.delayed, call.identity.tenants
    return call.service.cache.get(
        ("usage", queue, mine), SECONDS, lambda: gate_usage(delayed, queue, mine)
    )


@operations.add("GET", "/limits", "read", Limits, query=LimitsQuery)
def list_limits(call: Call) -> dict[str, Any]:
    """Limits by queue and name: capacity, use and waiting messages."""
    query: LimitsQuery = call.query
    place = tuple(cursors.read(query.cursor, str, str)) if query.cursor else ("", "")
    found: list[dict[str, Any]] = []
    for queue in sorted(call.service.queues(call.identity, query.queue)):
        if queue < place[0]:
            continue
        for info in limits(call.service.delayed, usage_of(call, queue)):
            if (info.queue, info.name) <= place:
                continue
            if len(found) == query.limit:
                last = found[-1]
                return {"limits": found, "next": cursors.write(last["queue"], last["name"])}
            found.append(info_data(info))
    return {"limits": found, "next": None}


@operations.add("GET", "/queues/{queue}/limits", "read", QueueLimits)
def get_queue_limits(call: Call) -> dict[str, Any]:
    """The limits of a queue, and the number of messages that wait for their turn."""
    queue = call.queue
    usage, delayed = usage_of(call, queue), call.service.delayed
    own = sum(each.waiting for each in usage.tenants.values())
    return {
        "queue": queue,
        "turns_by": usage.declarations.turns_by or None,
        "waiting": own if usage.tenants_only else _waiting(delayed, queue),
        "waiting_for_turn": usage.turn.waiting,
        "is_complete": usage.is_complete,
        "limits": [info_data(info) for info in limits(delayed, usage)],
    }


def _waiting(delayed: Queues, queue: str) -> int:
    store = delayed.store
    return sum(waiting_count(store, shard) for shard in store.shards.all(queue))


@operations.add("GET", "/queues/{queue}/running", "read", RunningTasks)
def list_running(call: Call) -> dict[str, Any]:
    """The running tasks that have slots in a queue: since when, where, and of which limits."""
    queue, delayed = call.queue, call.service.delayed
    found = call.service.cache.get(
        ("running", queue), SECONDS, lambda: running(delayed, queue, RUNNING)
    )
    mine = [each for each in found if call.identity.sees(each.queue, each.tenant)]
    return {
        "queue": queue,
        "is_complete": len(found) < RUNNING,
        "tasks": [_running_data(each) for each in mine],
    }


def _running_data(each: RunningTask) -> dict[str, Any]:
    since = None if each.since_ms is None else from_ms(each.since_ms).isoformat()
    known = {"id": each.id or None, "task": each.task or None, "since": since}
    return {**known, **{name: getattr(each, name) for name in SHOWN}}


@operations.add(
    "GET", "/queues/{queue}/limits/{name}", "read", LimitDetail, query=KeysQuery, problems=(404,)
)
def get_limit(call: Call) -> dict[str, Any]:
    """A limit with its keys and the tasks that wait for it."""
    query, queue, name = call.query, call.queue, call.named("name")
    delayed, usage = call.service.delayed, usage_of(call, queue)
    info = limit(delayed, usage, name)
    if info is None:
        raise Problem(404, f"queue {queue!r} has no limit {name!r}"[:300])
    page, following = keys_of(call, usage, info, query, query.limit)
    return {
        **info_data(info),
        "page": [info_data(each) for each in page],
        "tasks": [state_of(call.service, each) for each in waiting_tasks(call, usage, name)],
        "next": following,
    }


@operations.add(
    "POST",
    "/queues/{queue}/limits/{name}/set",
    "admin",
    LimitState,
    body=NewNumbers,
    problems=(404,),  # a name with a line break
)
def set_limit(call: Call) -> dict[str, Any]:
    """Change the numbers of a limit, for all workers and all waiting tasks."""
    return info_data(change_limit(call, call.queue, call.named("name"), call.body))


@operations.add("POST", "/queues/{queue}/limits/{name}/reset", "admin", WasReset, problems=(404,))
def reset_limit(call: Call) -> dict[str, Any]:
    """Restore the declared numbers of a limit."""
    return {"reset": restore_limit(call, call.queue, call.named("name"))}


def change_limit(call: Call, queue: str, name: str, given: NewNumbers) -> LimitInfo:
    """Change the numbers of a limit for the caller. Raises a Problem if it cannot be changed."""
    length = None if given.length is None else span_of(given.length)
    with _changing(call, "set-limit", queue, name):
        return call.service.delayed.set_limit(
            queue,
            name,
            concurrency=given.concurrency,
            rate=given.rate,
            burst=given.burst,
            why=given.why,
            by=call.identity.name,
            for_=length,
        )


def restore_limit(call: Call, queue: str, name: str) -> bool:
    """Restore the declared numbers for the caller; returns whether others were set."""
    with _changing(call, "reset-limit", queue, name):
        return call.service.delayed.reset_limit(queue, name)


@contextmanager
def _changing(call: Call, verb: str, queue: str, name: str) -> Iterator[None]:
    """Raises a Problem if the caller may not change the limit, or if it cannot be changed."""
    check_may_change(call.identity, queue, name)
    call.note(verb, f"{queue} {name}")
    try:
        yield
    except QueryError as error:
        raise Problem(422, str(error)[:300]) from None
    call.service.cache.forget()


def check_may_change(identity: Identity, queue: str, name: str) -> None:
    """Raises a Problem if a caller may not change the limit of a queue."""
    identity.require_whole()
    identity.check_queue(queue)
    if name.startswith(GLOBAL):
        identity.require_all_queues()


def keys_of(
    call: Call, usage: GateUsage, info: LimitInfo, query: Any, size: int
) -> tuple[list[KeyInfo], str | None]:
    """A page of a limit's keys, by the `key` and `cursor` of a query, and the next cursor."""
    after = tuple(cursors.read(query.cursor, int, int, str)) if query.cursor else None
    if info.keys is None:
        return [], None
    delayed = call.service.delayed
    page, following = keys_page(delayed, usage, info.name, size, query.key or "", after)
    return page, cursors.write(*following) if following else None


def waiting_tasks(call: Call, usage: GateUsage, name: str) -> list[TaskInfo]:
    """Some tasks that wait for a limit and that the caller may see."""
    store = call.service.delayed.store
    found: list[TaskInfo] = []
    for member in usage.first_ids(store, names_of(usage, name)):
        for each in lookup_by_id(store, usage.queue, member.partition("\x1f")[0]):
            info = TaskInfo.of(each)
            if info.state == "waiting" and call.identity.sees(info.queue, info.tenant):
                found.append(info)
                break
    return found


@operations.add("GET", "/tenants", "read", Tenants, query=TenantsQuery)
def list_tenants(call: Call) -> dict[str, Any]:
    """Tenants that wait for their turn or for limits, the busiest first."""
    found, following, is_complete = tenants_page(call, call.query)
    return {
        "tenants": [info_data(each) for each in found],
        "is_complete": is_complete,
        "next": following,
    }


def tenants_page(call: Call, query: TenantsQuery) -> tuple[list[TenantInfo], str | None, bool]:
    """A page of tenants, the next cursor (None: no more), and whether all messages were read."""
    place: Place = -NEVER_MS, "", ""
    if query.cursor:
        waiting, name, queue = cursors.read(query.cursor, int, str, str)
        place = waiting, name, queue
    names = call.service.queues(call.identity, query.queue)
    usages = {name: usage_of(call, name) for name in names}
    each = heapq.merge(*(_behind(usage, place) for usage in usages.values()))
    matching = (at for at in each if query.tenant is None or fnmatchcase(at[1], query.tenant))
    first = [*islice(matching, query.limit + 1)]
    shown = first[: query.limit]
    infos = {
        (info.tenant, queue): info
        for queue, usage in usages.items()
        for info in tenants(
            call.service.delayed, usage, [name for _, name, its in shown if its == queue]
        )
    }
    return (
        [infos[name, queue] for _, name, queue in shown],
        cursors.write(*shown[-1]) if len(first) > len(shown) else None,
        all(usage.is_complete for usage in usages.values()),
    )


def _behind(usage: GateUsage, place: Place) -> Iterator[Place]:
    order = usage.busiest
    start = bisect_left(order, place[:2])
    each = ((waiting, name, usage.queue) for waiting, name in islice(order, start, None))
    return (at for at in each if at > place)


@operations.add("GET", "/tenants/{tenant}", "read", OneTenant)
def get_tenant(call: Call) -> dict[str, Any]:
    """The waiting tasks of a tenant in each queue, and the reasons."""
    name = call.named("tenant")
    call.identity.check_tenant(name)
    delayed, found = call.service.delayed, []
    for queue in call.service.queues(call.identity):
        usage = gate_usage(delayed, queue, [name])
        if known_as(name) in usage.tenants:
            found += tenants(delayed, usage, [known_as(name)])
    return {
        "tenant": name,
        "waiting": sum(each.waiting for each in found),
        "queues": [info_data(each) for each in found],
    }
