"""Where a task is: in the backlog, with a worker, or what the last event says of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from celery_ext.tasks.task_info import TaskInfo
from celery_ext.tasks.times import from_ms
from kombu_delayed.inspection import events as streams
from kombu_delayed.inspection.backlog import Backlog
from kombu_delayed.inspection.events import Event
from kombu_delayed.inspection.lookup import lookup_by_id, lookup_by_reading
from kombu_delayed.store.store import Store

from ..auth.identity import Identity
from ..callbacks.jobs import is_job, job_of
from ..service.service import Service

#: Events of a queue that are looked at, the newest first.
EVENTS_LIMIT = 2_000

#: Messages of a queue that may be read to find one that is ready or unacked.
READING_LIMIT = 10_000

_BY_STATE = {
    "delayed": "scheduled",
    "waiting": "waiting",
    "ready": "waiting",
    "unacked": "running",
    "dead": "dead",
}

_BY_EVENT = {
    "scheduled": "scheduled",
    "rescheduled": "waiting",
    "cancelled": "cancelled",
    "waiting": "waiting",
    "delivered": "running",
    "acked": "done",
    "dropped": "cancelled",
    "released": "waiting",
    "reclaimed": "waiting",
    "buried": "dead",
    "replayed": "waiting",
}

State = dict[str, Any]


def delayed_infos(
    service: Service, identity: Identity, id: str, queue: str | None = None
) -> dict[str, list[TaskInfo]]:
    """The delayed tasks with an id in the first queue that has some, by shard.

    Only those that are the caller's.
    """
    store = service.delayed.store
    for name in _names(service, identity, queue):
        found: dict[str, list[TaskInfo]] = {}
        for shard in store.shards.nearest(name, id):
            infos = [TaskInfo.waiting(shard, each) for each in Backlog(store, shard).get(id)]
            if mine := [info for info in infos if identity.sees(info.queue, info.tenant)]:
                found[shard] = mine
        if found:
            return found
    return {}


def first_info(found: dict[str, list[TaskInfo]]) -> TaskInfo | None:
    """One of what `delayed_infos` has found."""
    return next((infos[0] for infos in found.values()), None)


def find(service: Service, identity: Identity, id: str, queue: str | None = None) -> State | None:
    """What is known of a task; None: nothing, or it is not the caller's."""
    store = service.delayed.store
    shards: list[str] = []
    for name in _names(service, identity, queue):
        for shard in store.shards.nearest(name, id):
            for found in lookup_by_id(store, shard, id):
                info = TaskInfo.of(found)
                if identity.sees(info.queue, info.tenant):
                    return state_of(service, info, found.at_ms)
            shards.append(shard)
    if state := _by_event(store, shards, identity, id):
        return state
    held = _held(service, shards, identity, id)
    return None if held is None else state_of(service, held)


def _names(service: Service, identity: Identity, queue: str | None) -> Iterator[str]:
    """The app's own queues in front: those that others use are known by reading key names."""
    if queue is not None:
        yield from service.queues(identity, queue)
        return
    own = [name for name in service.own_queues() if identity.sees_queue(name)]
    yield from own
    yield from (name for name in service.queues(identity) if name not in own)


def _by_event(store: Store, shards: list[str], identity: Identity, id: str) -> State | None:
    newest: Event | None = None
    for shard in shards:
        for event in reversed(streams.newest(store, shard, EVENTS_LIMIT)):
            if event.id == id and identity.sees(event.queue, event.tenant or None):
                if newest is None or event.at_ms > newest.at_ms:
                    newest = event
                break
    if newest is None:
        return None
    status = _BY_EVENT.get(newest.event, "waiting")
    is_end = status in ("done", "dead", "cancelled")
    return {
        "id": id,
        "status": status,
        "waiting_for": "worker" if status == "waiting" else None,
        "task": newest.task,
        "queue": newest.queue,
        "due": None if newest.due_ms is None else from_ms(newest.due_ms).isoformat(),
        "tenant": newest.tenant or None,
        "consumer": newest.consumer or None,
        "reason": newest.reason or None,
        "deliveries": newest.deliveries,
        "at": from_ms(newest.at_ms).isoformat() if is_end else None,
    }


def _held(service: Service, shards: list[str], identity: Identity, id: str) -> TaskInfo | None:
    """A task that is ready or unacked, where not too many are."""
    store = service.delayed.store
    for shard in shards:
        size = store.size(shard)
        held = sum(unacked for _, _, unacked in store.leases.consumers(shard))
        if size.ready + held > READING_LIMIT:
            continue
        for found in lookup_by_reading(store, shard, id):
            info = TaskInfo.of(found)
            if identity.sees(info.queue, info.tenant):
                return info
    return None


def message_of(
    service: Service, identity: Identity, id: str, queue: str | None = None
) -> TaskInfo | None:
    """A task that is delayed, ready or unacked, with its message."""
    if info := first_info(delayed_infos(service, identity, id, queue)):
        return info
    nearest = service.delayed.store.shards.nearest
    names = _names(service, identity, queue)
    return _held(service, [each for name in names for each in nearest(name, id)], identity, id)


def _waiting_for(info: TaskInfo) -> str | None:
    if info.state == "waiting":
        return info.reason.removeprefix("waits for ")
    return "worker" if info.state == "ready" else None


def state_of(service: Service, info: TaskInfo, at_ms: int | None = None) -> State:
    found: State = {
        "id": info.id,
        "status": _BY_STATE[info.state],
        "waiting_for": _waiting_for(info),
        "task": info.task,
        "queue": info.queue,
        "due": info.eta.isoformat() if info.eta else None,
        "priority": info.priority,
        "tenant": info.tenant,
        "consumer": info.consumer or None,
        "reason": info.reason or None,
        "deliveries": info.deliveries,
        "retries": info.headers.get("retries"),
        "at": None if at_ms is None else from_ms(at_ms).isoformat(),
    }
    if is_job(info):
        job = job_of(service.app, info)
        found |= {"topic": job.get("topic"), "callback": job.get("callback")}
    else:
        found |= {"args": info.args, "kwargs": info.kwargs}
    return found
