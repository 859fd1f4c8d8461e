"""The partitions of the backlog."""

from __future__ import annotations

from itertools import islice

from pydantic import BaseModel, Field

from celery_ext.http.api.fields import Name
from kombu_delayed.inspection.backlog import partition_count, partitions

from ..visit import Shown, View, Visit, asked

#: Partitions on a page.
PAGE_SIZE = 100


class _Asked(BaseModel):
    queue: Name | None = None
    shard: int = Field(0, ge=0, le=100_000)
    start: int = Field(0, ge=0, le=2**31)


def look(visit: Visit) -> Shown:
    query = asked(visit, _Asked)
    store = visit.service.delayed.store
    counts = {
        name: (partition_count(store, name), store.delayed_count(name))
        for name in visit.shards(query.queue)
    }
    used = {name: found for name, found in counts.items() if found[0]}
    chosen = next(iter(used), None)
    if query.queue is not None:
        shards = store.shards.all(query.queue)
        chosen = shards[query.shard] if query.shard < len(shards) else None
    found = partitions(store, chosen, query.start) if chosen is not None else iter(())
    return {
        "counts": used,
        "chosen": chosen,
        "queue": query.queue,
        "start": query.start,
        "page": list(islice(found, PAGE_SIZE)),
        "page_size": PAGE_SIZE,
        "total": used.get(chosen, (0, 0))[0] if chosen else 0,
        "partition_size": store.partition_size,
    }


VIEWS = [View("partitions", "/partitions", "Partitions", look, is_whole=True)]
