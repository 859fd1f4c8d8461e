"""Ready tasks of a request, found by reading what is ready, up to a bound."""

from __future__ import annotations

from collections.abc import Sequence

from celery_ext.control.outcomes import is_certain
from celery_ext.control.ready import ReadyTask, ready_pages
from kombu_delayed.inspection.ready import needles_of

from ..auth.identity import Identity
from ..problems import Problem
from ..service.service import Service
from .status import history_of, names_of

#: Ready messages that one request reads to find tasks.
READ = 100_000

#: What an empty shard costs: a call that reads no message.
EMPTY = 20


def ready_of(
    service: Service, identity: Identity, ids: Sequence[str], queue: str | None = None
) -> list[ReadyTask]:
    """The caller's ready tasks with some ids, in the first queue that has any.

    Raises a Problem where none is found and more are ready than one request may read.
    """
    ids = [id for id in ids if not _is_elsewhere(service, identity, id, queue)]
    store, left, is_crowded = service.delayed.store, READ, False
    for name in names_of(service, identity, queue) if ids else ():
        found: list[ReadyTask] = []
        for shard in store.shards.nearest(name, ids[0]):
            count = store.size(shard).ready
            left -= count + EMPTY
            if left < 0:
                left, is_crowded = left + count, True
            elif count:
                found += _in_shard(service, identity, shard, ids)
        if found:
            return found
    if is_crowded:
        detail = f"more than {READ} tasks are ready, too many to look for one: revoke it, or name"
        raise Problem(409, f"{detail} its queue if it is another one")
    return []


def _is_elsewhere(service: Service, identity: Identity, id: str, queue: str | None) -> bool:
    record = history_of(service, identity, id, queue)
    return record is not None and is_certain(record)


def _in_shard(
    service: Service, identity: Identity, shard: str, ids: Sequence[str]
) -> list[ReadyTask]:
    meant = frozenset(ids)
    return [
        task
        for page in ready_pages(service.delayed, [shard], needles_of(ids))
        for task in page
        if task.info.id in meant and identity.sees(task.info.queue, task.info.tenant)
    ]
