"""Where a task is: in the backlog, with a worker, or what the last event says of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from celery_ext.app.queues import despite_nodes_down
from celery_ext.control.outcomes import SHORT, is_certain, newest, recorded_and_kept, recorded_in
from celery_ext.tasks.history import TaskHistory
from celery_ext.tasks.task_info import TaskInfo
from celery_ext.tasks.times import from_ms
from kombu_delayed.inspection import events as streams
from kombu_delayed.inspection.backlog import Backlog
from kombu_delayed.inspection.events import Event
from kombu_delayed.inspection.lookup import Found, lookup_by_reading
from kombu_delayed.inspection.ready.index import MOST, Placed
from kombu_delayed.store.outcomes.records import Outcomes
from kombu_delayed.store.store import Store

from ..auth.identity import Identity
from ..callbacks.jobs import is_job, job_of
from ..service.service import Service

#: How many events of a queue are searched, the newest first.
EVENTS_LIMIT = 2_000

#: How many messages of a queue may be read to find one that is ready or unacked.
READING_LIMIT = 10_000

_BY_STATE = {
    "delayed": "scheduled",
    "retrying": "retrying",
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

#: The status for each state of a record, where the names differ.
_BY_RECORD = {
    "received": "running",
    "replaced": "waiting",
    "ignored": "succeeded",
    "unknown": "done",
}

#: How long it takes at most until a worker has recorded what it did with a task.
RECORDED_MS = 15_000

State = dict[str, Any]


def delayed_infos(
    service: Service, identity: Identity, id: str, queue: str | None = None
) -> dict[str, list[TaskInfo]]:
    """The delayed tasks with an id in the first queue that has some, by shard.

    Only those that the caller may see.
    """
    store = service.delayed.store
    for names in places(service, identity, queue):
        shards = {name: store.shards.nearest(name, id) for name in names}
        some = with_id(store, [*chain.from_iterable(shards.values())], id)
        for each in shards.values():
            found: dict[str, list[TaskInfo]] = {}
            for shard in filter(some.__contains__, each):
                infos = [TaskInfo.waiting(shard, one) for one in Backlog(store, shard).get(id)]
                if mine := [info for info in infos if identity.sees(info.queue, info.tenant)]:
                    found[shard] = mine
            if found:
                return found
    return {}


def with_id(store: Store, shards: Sequence[str], id: str) -> set[str]:
    """The shards that may have a delayed message with an id. All are asked in one go."""
    hashes = [
        (shard, hash)
        for shard, keys in zip(shards, map(store.keys, shards), strict=True)
        for hash in (keys.messages, keys.duplicates)
    ]
    calls = (store.call("records", shard, hash=hash, fields=[id]) for shard, hash in hashes)
    answers = zip(hashes, store.together([*calls]), strict=True)
    # An error is raised again when this shard is read.
    return {shard for (shard, _), found in answers if isinstance(found, Exception) or found[0]}


def first_info(found: dict[str, list[TaskInfo]]) -> TaskInfo | None:
    """The first task that `delayed_infos` has found."""
    return next((infos[0] for infos in found.values()), None)


@dataclass
class Ask:
    """A caller's question about a task, and the findings so far."""

    identity: Identity
    id: str
    queue: str | None = None
    state: State | None = None
    record: TaskHistory | None = None
    #: The shards that were searched.
    shards: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Raises a Problem if the caller may not see the queue."""
        if self.queue is not None:
            self.identity.check_queue(self.queue)


@despite_nodes_down
def find(service: Service, identity: Identity, id: str, queue: str | None = None) -> State | None:
    """The state of a task; None: it is unknown, or the caller may not see it."""
    ask = Ask(identity, id, queue)
    look_up(service, [ask])
    return ask.state or find_elsewhere(service, ask)


def look_up(service: Service, asks: Sequence[Ask]) -> None:
    """Look for each task in its queue or the app's queues: two round trips for all of them."""
    _look(service, [(ask, next(places(service, ask.identity, ask.queue))) for ask in asks])


def find_elsewhere(service: Service, ask: Ask) -> State | None:
    """The state of a task that `look_up` has not found; None: as `find`."""
    if ask.queue is None:
        for names in islice(places(service, ask.identity, None), 1, None):
            _look(service, [(ask, names)])
            if ask.state:
                return ask.state
    identity, id, record = ask.identity, ask.id, ask.record
    is_unknown = record is None or record.state == "unknown"
    if is_unknown and (state := _by_event(service.delayed.store, ask.shards, identity, id)):
        if state["status"] in ("scheduled", "waiting"):  # it may have moved past this search
            again = Ask(identity, id, state["queue"])
            look_up(service, [again])
            return again.state or state
        return state
    held = _held(service, ask.shards, identity, id)
    if held is None:
        return None if record is None else state_of_record(record)
    return state_of(service, held)


def _look(service: Service, asks: Sequence[tuple[Ask, Sequence[str]]]) -> None:
    """Look for each task in some queues: for all in one go, and then for the ready ones."""
    delayed = service.delayed
    nearest = delayed.store.shards.nearest
    shards = {
        n: [shard for name in names for shard in nearest(name, ask.id)]
        for n, (ask, names) in enumerate(asks)
    }
    recorded, kept = recorded_and_kept(delayed, _ids(asks, shards))
    for n, (ask, _) in enumerate(asks):
        found = [(shard, ask.id) for shard in shards[n]]
        histories = [recorded[each] for each in found if each in recorded]
        mine = [each for each in histories if ask.identity.sees(each.queue, each.tenant)]
        ask.record = newest([ask.record, *mine] if ask.record else mine)
        ask.state = _kept(service, ask, [one for each in found for one in kept.get(each, ())])
        ask.shards += shards[n]
        if ask.state:
            del shards[n]
    certain = {n for n in shards if is_certain(asks[n][0].record)}
    most = SHORT if certain == shards.keys() else MOST
    ready, _ = delayed.ready_index.find_all(delayed.store, _ids(asks, shards), most)
    for n, names in shards.items():
        ask, _ = asks[n]
        placed = (one for shard in names for one in ready.get((shard, ask.id), ()))
        if info := _mine(ask.identity, placed):
            ask.state = state_of(service, info)
        elif ask.record is not None and n in certain:
            ask.state = state_of_record(ask.record)


def _ids(
    asks: Sequence[tuple[Ask, Sequence[str]]], shards: Mapping[int, Sequence[str]]
) -> dict[str, list[str]]:
    """The ids to look for in each shard; `shards` has the shards of each ask by its number."""
    found: dict[str, dict[str, None]] = {}
    for n, names in shards.items():
        for shard in names:
            found.setdefault(shard, {})[asks[n][0].id] = None
    return {shard: [*ids] for shard, ids in found.items()}


def _mine(identity: Identity, placed: Iterable[Placed]) -> TaskInfo | None:
    """The first of some ready tasks that the caller may see."""
    infos = (TaskInfo.of(each.found()) for each in placed)
    return next((info for info in infos if identity.sees(info.queue, info.tenant)), None)


def _kept(service: Service, ask: Ask, kept: list[Found]) -> State | None:
    """The delayed or dead message that the caller may see, preferably in its record's shard."""
    record = ask.record
    kept.sort(key=lambda each: record is None or each.queue != record.shard)
    for found in kept:
        info = TaskInfo.of(found)
        if ask.identity.sees(info.queue, info.tenant):
            if record is not None and found.queue == record.shard:
                info = info.with_history(record)
            return state_of(service, info, found.at_ms)
    return None


@despite_nodes_down
def history_of(
    service: Service, identity: Identity, id: str, queue: str | None = None
) -> TaskHistory | None:
    """The newest record of a task in the given queue, or in the app's queues.

    Without a given queue, it looks in all other queues as well if the task may have moved.
    """
    nearest, mine = service.delayed.store.shards.nearest, list[TaskHistory]()
    for names in places(service, identity, queue):
        shards = [shard for name in names for shard in nearest(name, id)]
        found = recorded_in(service.delayed, shards, id)
        mine += [each for each in found if identity.sees(each.queue, each.tenant)]
        if is_certain(newest(mine)):
            break
    return newest(mine)


def places(service: Service, identity: Identity, queue: str | None) -> Iterator[list[str]]:
    """The queues to read, a list in one go: the given queue, or the app's and then the others."""
    own = [name for name in service.own_queues() if identity.sees_queue(name)]
    if queue is None:
        yield own
    names = service.queues(identity, queue)
    yield names if queue is not None else [name for name in names if name not in own]


def state_of_record(record: TaskHistory) -> State:
    """The state of a task as workers have recorded it."""
    failure, ended = record.failure, record.ended
    status = _BY_RECORD.get(record.state, record.state)
    has_failed = failure is not None and status in ("failed", "lost", "retrying")
    return {
        "id": record.id,
        "status": status,
        "waiting_for": None,
        "task": record.task,
        "queue": record.queue,
        "due": None,
        "priority": None,
        "deliveries": None,
        "tenant": record.tenant,
        "args": failure.args if failure else None,
        "kwargs": failure.kwargs if failure else None,
        "consumer": record.worker or None,
        "reason": failure.said if has_failed and failure else None,
        "retries": record.steps[-1].attempt - 1 if record.steps else None,
        **_last_run(record),
        "at": ended.isoformat() if ended else None,
    }


def _last_run(record: TaskHistory | None) -> State:
    """When the last run began, and how long it took if it has ended."""
    if record is None:
        return {"started": None, "run_seconds": None}
    return {
        "started": record.started.isoformat() if record.started else None,
        "run_seconds": None if record.run_ms is None else record.run_ms / 1000,
    }


def names_of(service: Service, identity: Identity, queue: str | None) -> Iterator[str]:
    """The queues to read, the app's own first: finding the others takes a scan of the key names."""
    return chain.from_iterable(places(service, identity, queue))


def _by_event(store: Store, shards: list[str], identity: Identity, id: str) -> State | None:
    last: Event | None = None
    for shard in shards:
        for event in reversed(streams.newest(store, shard, EVENTS_LIMIT)):
            if event.id == id and identity.sees(event.queue, event.tenant or None):
                if last is None or event.at_ms > last.at_ms:
                    last = event
                break
    if last is None:
        return None
    status = _BY_EVENT.get(last.event, "waiting")
    if status == "scheduled" and (last.due_ms or 0) <= last.at_ms:
        status = "waiting"  # it was due when it was sent
    if status == "done" and _will_be_recorded(store, last):
        status = "running"  # a worker acknowledges most tasks before they run
    is_end = status in ("done", "dead", "cancelled")
    return {
        "id": id,
        "status": status,
        "waiting_for": "worker" if status == "waiting" else None,
        "task": last.task,
        "queue": last.queue,
        "due": None if last.due_ms is None else from_ms(last.due_ms).isoformat(),
        "tenant": last.tenant or None,
        "consumer": last.consumer or None,
        "reason": last.reason or None,
        "deliveries": last.deliveries,
        "at": from_ms(last.at_ms).isoformat() if is_end else None,
    }


def _will_be_recorded(store: Store, event: Event) -> bool:
    """Returns whether workers record outcomes of the queue, but had no time for this one yet."""
    is_new = event.at_ms > int(time.time() * 1000) - RECORDED_MS
    return is_new and Outcomes(store).are_recorded(event.stream)


def _ready(service: Service, shards: list[str], identity: Identity, id: str) -> TaskInfo | None:
    delayed = service.delayed
    return _mine(identity, delayed.ready_index.find(delayed.store, shards, id)[0])


def _held(service: Service, shards: list[str], identity: Identity, id: str) -> TaskInfo | None:
    """A task that is ready or unacked, found in shards that do not have too many of these."""
    store = service.delayed.store
    for shard in shards:
        size = store.size(shard, with_delayed=False)
        held = sum(unacked for _, _, unacked in store.leases.consumers(shard))
        if size.ready + held > READING_LIMIT:
            continue
        for found in lookup_by_reading(store, shard, id):
            info = TaskInfo.of(found)
            if identity.sees(info.queue, info.tenant):
                return info
    return None


def is_crowded(service: Service, identity: Identity, queue: str | None) -> bool:
    """Returns whether more messages are ready in a shard than may be read to find one task."""
    store = service.delayed.store
    shards = service.shards(identity, queue)
    return any(store.size(shard, with_delayed=False).ready > READING_LIMIT for shard in shards)


def message_of(
    service: Service, identity: Identity, id: str, queue: str | None = None
) -> TaskInfo | None:
    """A task that is delayed, ready or unacked, with its message."""
    if info := first_info(delayed_infos(service, identity, id, queue)):
        return info
    nearest = service.delayed.store.shards.nearest
    names = names_of(service, identity, queue)
    shards = [each for name in names for each in nearest(name, id)]
    return _ready(service, shards, identity, id) or _held(service, shards, identity, id)


def _waiting_for(info: TaskInfo) -> str | None:
    if info.state == "waiting":
        return info.reason.removeprefix("waits for ")
    return "worker" if info.state == "ready" else None


def state_of(service: Service, info: TaskInfo, at_ms: int | None = None) -> State:
    retries = info.headers.get("retries")
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
        "retries": retries if type(retries) is int else None,  # a sender may write anything
        **_last_run(info.history),
        "at": None if at_ms is None else from_ms(at_ms).isoformat(),
    }
    if is_job(info):
        job = job_of(service.app, info)
        found |= {"topic": job.get("topic"), "callback": job.get("callback")}
    else:
        found |= {"args": info.args, "kwargs": info.kwargs}
    return found
