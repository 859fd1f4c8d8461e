"""Commands of remote control: `inspect scheduled` and `query_task` with the backlog, and `hold`.

Imported in workers only: it replaces and adds commands of the remote control of this process.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from celery.worker import control
from kombu.utils.functional import maybe_list

from kombu_delayed.consumer.consumer import Consumer

from ...control.delayed import Delayed
from ...control.policies.pauses import HOLD
from ...errors import BrokerError
from ...tasks.body import read_body
from ...tasks.task_info import TaskInfo

#: How many tasks of the backlog are in an answer.
PAGE_SIZE = 100

_own_scheduled = control.scheduled
_own_query_task = control.query_task


@control.inspect_command(alias="dump_schedule")
def scheduled(state: Any, **kwargs: Any) -> list[dict[str, Any]]:
    """List of currently scheduled ETA/countdown tasks, the first of the backlog among them.

    `total` is how many are delayed in the queues that the worker consumes.
    """
    infos, total = _backlog(state)
    entries = [_entry(info, state) for info in infos]
    return [*_own_scheduled(state), *({**entry, "total": total} for entry in entries)]


@control.inspect_command(variadic="ids", signature="[id1 [id2 [... [idN]]]]")
def query_task(state: Any, ids: Any, **kwargs: Any) -> dict[str, Any]:
    """Query for task information by id."""
    found: dict[str, Any] = _own_query_task(state, ids)
    missing = [id for id in maybe_list(ids) or () if id not in found]
    delayed = {info.id: ("delayed", _request(info, state)) for info in _delayed(state, missing)}
    return {**found, **delayed}


@control.control_command(name=HOLD, args=[("queue", str)], signature="<queue>")
def hold(state: Any, queue: str, **kwargs: Any) -> dict[str, str]:
    """Return the messages of a queue that have not started, as it is paused or a limit is lower."""
    channel = getattr(state.consumer.task_consumer, "channel", None)
    consumer = getattr(channel, "consumer", None)
    if isinstance(consumer, Consumer):  # else this worker's broker keeps no backlog
        consumer.hold(queue)
    return {"ok": f"what has not begun of {queue} goes back"}


def _backlog(state: Any) -> tuple[list[TaskInfo], int]:
    delayed = _delayed_of(state)
    if delayed is None:
        return [], 0
    queues = _shards(delayed, state)
    in_order = heapq.merge(
        *(_all(delayed, each) for each in queues), key=lambda info: info.due_ms or 0
    )
    total = sum(delayed.store.delayed_count(each) for each in queues)
    return [*islice(in_order, PAGE_SIZE)], total


def _delayed_of(state: Any) -> Delayed | None:
    """The app's backlog, or None if this worker's broker keeps none."""
    found = getattr(state.app, "delayed", None)
    try:
        return found if isinstance(found, Delayed) and found.connection else None
    except BrokerError:
        return None


def _all(delayed: Delayed, queue: str) -> Iterator[TaskInfo]:
    for page in delayed.backlog(queue).pages(size=PAGE_SIZE):
        yield from (TaskInfo.waiting(queue, waiting) for waiting in page)


def _delayed(state: Any, ids: Iterable[str]) -> Iterator[TaskInfo]:
    if (delayed := _delayed_of(state)) is None:
        return
    for queue in _shards(delayed, state):
        for id in ids:
            for waiting in delayed.backlog(queue).get(id):
                yield TaskInfo.waiting(queue, waiting)


def _shards(delayed: Delayed, state: Any) -> list[str]:
    """The queues that the worker consumes now, each as its shards."""
    consumer = state.consumer.task_consumer
    queues = [queue.name for queue in consumer.queues] if consumer is not None else []
    return [shard for queue in queues for shard in delayed.shards(queue)]


def _entry(info: TaskInfo, state: Any) -> dict[str, Any]:
    return {
        "eta": info.eta.isoformat() if info.eta else None,
        "priority": info.priority,
        "request": _request(info, state),
    }


def _request(info: TaskInfo, state: Any) -> dict[str, Any]:
    """Like `celery.worker.request.Request.info`; arguments that cannot be read here are text."""
    where = info.properties.get("delivery_info") or {}
    args, kwargs, _ = read_body(state.app, info) or (info.args, info.kwargs, {})
    return {
        "id": info.id,
        "name": info.headers.get("shadow") or info.task,
        "args": args,
        "kwargs": kwargs,
        "type": info.task,
        "hostname": state.hostname,
        "time_start": None,
        "acknowledged": False,
        "delivery_info": {
            "exchange": where.get("exchange"),
            "routing_key": where.get("routing_key"),
            "priority": info.properties.get("priority"),
            "redelivered": False,
        },
        "worker_pid": None,
    }
