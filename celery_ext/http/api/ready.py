"""Ready tasks of a request, found by reading what is ready, up to a bound."""

from __future__ import annotations

from celery_ext.control.outcomes import is_certain
from celery_ext.control.ready import ReadyTask, ready_pages
from kombu_delayed.inspection.ready import needles_of

from ..auth.identity import Identity
from ..problems import Problem
from ..service.service import Service
from .status import history_of, names_of

#: Ready messages that one request reads to find a task.
READ = 100_000

#: What an empty shard costs: a call that reads no message.
EMPTY = 20


def ready_of(
    service: Service, identity: Identity, id: str, queue: str | None = None
) -> list[ReadyTask]:
    """The caller's ready tasks with an id, in the first queue that has some.

    Raises a Problem where none is found and more are ready than one request may read.
    """
    record = history_of(service, identity, id, queue)
    if record is not None and is_certain(record):
        return []
    store, left, is_crowded = service.delayed.store, READ, False
    for name in names_of(service, identity, queue):
        found: list[ReadyTask] = []
        for shard in store.shards.nearest(name, id):
            count = store.size(shard).ready
            left -= count + EMPTY
            if left < 0:
                left, is_crowded = left + count, True
            elif count:
                found += _in_shard(service, identity, shard, id)
        if found:
            return found
    if is_crowded:
        detail = f"more than {READ} tasks are ready, too many to look for one: revoke it, or name"
        raise Problem(409, f"{detail} its queue if it is another one")
    return []


def _in_shard(service: Service, identity: Identity, shard: str, id: str) -> list[ReadyTask]:
    return [
        task
        for page in ready_pages(service.delayed, [shard], needles_of([id]))
        for task in page
        if task.info.id == id and identity.sees(task.info.queue, task.info.tenant)
    ]
