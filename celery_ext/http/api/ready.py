"""Finds the ready tasks of a request at once, or by reading ready messages up to a limit."""

from __future__ import annotations

from collections.abc import Sequence

from celery_ext.app.queues import despite_nodes_down
from celery_ext.control.changes.ready import ReadyTask, placed, ready_pages
from celery_ext.control.outcomes import is_certain
from celery_ext.tasks.task_info import TaskInfo
from kombu_delayed.inspection.ready.lists import needles_of

from ..auth.identity import Identity
from ..problems import Problem
from ..service.service import Service
from .status import delayed_infos, history_of, names_of, places

#: How many ready messages one request reads to find tasks.
READ = 100_000

#: How many messages an empty shard counts as: it costs a call that reads none.
EMPTY = 20

#: After this time, a search returns what it has found so far: arguments can be large.
SEARCH_SECONDS = 5.0


#: The delayed tasks of a request, by shard, or else its ready ones.
Waiting = tuple[dict[str, list[TaskInfo]], list[ReadyTask]]


@despite_nodes_down
def waiting_of(service: Service, identity: Identity, id: str, queue: str | None) -> Waiting | None:
    """The caller's tasks with an id that can still be changed; None if there are none."""
    if infos := delayed_infos(service, identity, id, queue):
        return infos, []
    ready = ready_of(service, identity, [id], queue)
    return ({}, ready) if ready else None


def ready_of(
    service: Service, identity: Identity, ids: Sequence[str], queue: str | None = None
) -> list[ReadyTask]:
    """The caller's ready tasks with some ids, in the first queues that have any.

    Raises a Problem if none is found and more are ready than one request may read.
    """
    shards_of, found = service.delayed.store.shards.all, list[ReadyTask]()
    certain = {id for id in ids if is_certain(history_of(service, identity, id, queue))}
    for names in places(service, identity, queue):
        shards = [shard for name in names for shard in shards_of(name)]
        tasks = placed(service.delayed, shards, ids, certain)
        found = [each for each in tasks if _sees(identity, each)]
        if found:
            break
    known = {each.info.id for each in found} | certain
    rest = [id for id in ids if id not in known]
    try:
        return found + (_by_reading(service, identity, rest, queue) if rest else [])
    except Problem:
        if found:
            return found
        raise


def _by_reading(
    service: Service, identity: Identity, ids: Sequence[str], queue: str | None
) -> list[ReadyTask]:
    store, left, is_crowded = service.delayed.store, READ, False
    for name in names_of(service, identity, queue):
        found: list[ReadyTask] = []
        for shard in store.shards.nearest(name, ids[0]):
            count = store.size(shard, with_delayed=False).ready
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


def _sees(identity: Identity, task: ReadyTask) -> bool:
    return identity.sees(task.info.queue, task.info.tenant)


def _in_shard(
    service: Service, identity: Identity, shard: str, ids: Sequence[str]
) -> list[ReadyTask]:
    wanted = frozenset(ids)
    return [
        task
        for page in ready_pages(service.delayed, [shard], needles_of(ids))
        for task in page
        if task.info.id in wanted and _sees(identity, task)
    ]
