"""How many messages there are, where and when."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

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
    def of(cls, store: Store, queue: str) -> Counts:
        """Count them."""
        size = store.size(queue)
        unacked = sum(info.unacked for info in ConsumerInfo.all_of(store, queue))
        return cls(size.delayed, size.due, size.ready, unacked, store.dead_count(queue))


@dataclass(frozen=True)
class ConsumerInfo:
    """Who consumes a queue. Others get what it holds when its lease has ended."""

    queue: str
    name: str
    lease_seconds: float
    unacked: int

    @classmethod
    def all_of(cls, store: Store, queue: str) -> Iterator[ConsumerInfo]:
        """The consumers of a queue, the one whose lease ends first in front."""
        for name, lease_ms, unacked in store.consumers(queue):
            yield cls(queue, name, lease_ms / 1000, unacked)


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
