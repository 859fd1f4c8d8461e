"""Tenants, as far as they can be counted without reading the backlog."""

from __future__ import annotations

from dataclasses import dataclass, field

from kombu_delayed import events as streams
from kombu_delayed.backlog import Backlog

from ...task_info import TaskInfo
from ..status import EVENTS_LIMIT
from .dead import newest
from .visit import Shown, View, Visit

#: Delayed tasks of each queue that are looked at: those that are due first.
NEXT_SIZE = 1_000

#: Tenants on the page, and queues that are looked at.
SHOWN, QUEUES = 200, 50

#: How old the counts may be.
SECONDS = 5.0


@dataclass
class Tenant:
    """Counts of what was looked at; times are ms since the epoch."""

    name: str
    next: int = 0
    first_due_ms: int | None = None
    delivered: int = 0
    done: int = 0
    dead: int = 0
    queues: set[str] = field(default_factory=set)

    @property
    def weight(self) -> int:
        """How much was seen of it."""
        return self.next + self.delivered + self.dead


class _Counts(dict[str, Tenant]):
    def __missing__(self, name: str) -> Tenant:
        return self.setdefault(name, Tenant(name))


def look(visit: Visit) -> Shown:
    key = ("tenants", visit.identity.tenants, visit.identity.queues)
    found = visit.recent.get(key, SECONDS, lambda: _read(visit))
    return {
        "tenants": found[:SHOWN],
        "tenant_count": len(found),
        "next_size": NEXT_SIZE,
        "events_size": EVENTS_LIMIT,
        "queue_limit": QUEUES if len(visit.queues()) > QUEUES else 0,
    }


def _read(visit: Visit) -> list[Tenant]:
    store, counts = visit.service.delayed.store, _Counts()
    shards = [shard for name in visit.queues()[:QUEUES] for shard in store.shards.all(name)]
    for shard in shards:
        page, _ = Backlog(store, shard).page(size=NEXT_SIZE)
        for waiting in page:
            _count_next(counts, TaskInfo.waiting(shard, waiting))
        for event in streams.newest(store, shard, EVENTS_LIMIT):
            if event.tenant:
                counts[event.tenant].queues.add(event.queue)
                counts[event.tenant].delivered += event.event == "delivered"
                counts[event.tenant].done += event.event == "acked"
    for task in newest(visit, shards):
        if tenant := task.info.tenant:
            counts[tenant].queues.add(task.queue)
            counts[tenant].dead += 1
    bound = visit.identity.tenants
    mine = [each for each in counts.values() if not bound or each.name in bound]
    return sorted(mine, key=lambda each: (-each.weight, each.name))


def _count_next(counts: _Counts, info: TaskInfo) -> None:
    if not info.tenant:
        return
    found = counts[info.tenant]
    found.queues.add(info.queue)
    found.next += 1
    if found.first_due_ms is None or (info.due_ms or 0) < found.first_due_ms:
        found.first_due_ms = info.due_ms


VIEWS = [View("tenants", "/tenants", "Tenants", look, seconds=5)]
