"""How many messages there are, where and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from kombu_delayed.shards import queue_of
from kombu_delayed.store import Store


@dataclass(frozen=True)
class Counts:
    """A queue's messages by state. `due` are those of `delayed` whose time has come."""

    delayed: int
    due: int
    ready: int
    unacked: int
    dead: int

    @classmethod
    def of(cls, store: Store, shards: Sequence[str]) -> Counts:
        """Count those of all shards of a queue."""
        sizes = [store.size(shard) for shard in shards]
        unacked = sum(info.unacked for info in ConsumerInfo.all_of(store, shards))
        dead = sum(map(store.dead_count, shards))
        ready, due, delayed = map(sum, zip(*sizes, strict=True))
        return cls(delayed, due, ready, unacked, dead)


@dataclass(frozen=True)
class ConsumerInfo:
    """Who consumes a queue. Others get what it holds when its lease has ended."""

    queue: str
    name: str
    lease_seconds: float
    unacked: int

    @classmethod
    def all_of(cls, store: Store, shards: Sequence[str]) -> list[ConsumerInfo]:
        """The consumers of a queue, given as its shards, whose lease ends first in front."""
        found: dict[str, ConsumerInfo] = {}
        for shard in shards:
            for name, lease_ms, unacked in store.consumers(shard):
                seconds, before = lease_ms / 1000, found.get(name)
                if before is not None:
                    seconds, unacked = min(seconds, before.lease_seconds), unacked + before.unacked
                found[name] = cls(queue_of(shard), name, seconds, unacked)
        return sorted(found.values(), key=lambda info: info.lease_seconds)


@dataclass(frozen=True)
class Bucket:
    """How many tasks are due within a time."""

    start: datetime
    length: timedelta
    count: int


@dataclass(frozen=True)
class Forecast:
    """Due load ahead. `overdue` was due before the first bucket, `later` is after the last."""

    buckets: list[Bucket]
    overdue: int
    later: int

    @property
    def total(self) -> int:
        """All delayed tasks."""
        return self.overdue + sum(bucket.count for bucket in self.buckets) + self.later
