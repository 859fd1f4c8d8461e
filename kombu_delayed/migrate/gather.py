"""Shards on their way to the stock transport, which has none."""

from __future__ import annotations

from collections.abc import Iterator

from ..store.calls.shards import is_shard, queue_of
from ..store.store import CALL_LIMIT
from .migration import Migration


def gather_steps(migration: Migration, shard: str) -> Iterator[int]:
    """Move a shard's ready messages to its queue's lists; yields how many each step has seen."""
    if not is_shard(shard):
        return
    store, client, queue = migration.store, migration.client, queue_of(shard)
    for source, target in zip(store.keys(shard).ready, store.keys(queue).ready, strict=True):
        left = client.llen(source)
        while left > 0:
            count = min(left, CALL_LIMIT)
            if not migration.dry:
                with client.pipeline(transaction=True) as pipeline:
                    for _ in range(count):
                        pipeline.lmove(source, target, "RIGHT", "LEFT")
                    pipeline.execute()
            migration.report.count(shard, "ready", "ready", count)
            left -= count
            yield count
