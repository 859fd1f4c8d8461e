"""Counts messages by state, consumer and due time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from kombu_delayed.inspection.backlog import Backlog
from kombu_delayed.store.calls.shards import queue_of
from kombu_delayed.store.queue_metrics import fold
from kombu_delayed.store.store import CALL_LIMIT, Store

from ..errors import QueryError
from ..tasks.times import to_ms


@dataclass(frozen=True)
class Counts:
    """A queue's messages by state. `due` counts those of `delayed` whose time has come.

    Above about 90,000, `due` is an estimate, as described for `Metrics`.
    """

    delayed: int
    due: int
    ready: int
    unacked: int
    dead: int

    @classmethod
    def of(cls, store: Store, shards: Sequence[str]) -> Counts:
        found = fold(map(store.metrics, shards))
        return cls(found.delayed, found.due, found.ready, found.unacked, found.dead)


@dataclass(frozen=True)
class ConsumerInfo:
    """A consumer of a queue. When its lease ends, others get the messages that it holds."""

    queue: str
    name: str
    lease_seconds: float
    unacked: int

    @classmethod
    def all_of(cls, store: Store, shards: Sequence[str]) -> list[ConsumerInfo]:
        """The consumers of a queue, given as its shards, ordered by the end of their leases."""
        found: dict[str, ConsumerInfo] = {}
        for shard in shards:
            for name, lease_ms, unacked in store.leases.consumers(shard):
                seconds, before = lease_ms / 1000, found.get(name)
                if before is not None:
                    seconds, unacked = min(seconds, before.lease_seconds), unacked + before.unacked
                found[name] = cls(queue_of(shard), name, seconds, unacked)
        return sorted(found.values(), key=lambda info: info.lease_seconds)


@dataclass(frozen=True)
class Bucket:
    """The number of tasks that are due within a period."""

    start: datetime
    length: timedelta
    count: int


@dataclass(frozen=True)
class Forecast:
    """Tasks by due time. `overdue` were due before the first bucket, `later` are after the last."""

    buckets: list[Bucket]
    overdue: int
    later: int

    @classmethod
    def of(
        cls,
        store: Store,
        shards: Sequence[str],
        hours: float,
        buckets: int,
        start: datetime | None = None,
    ) -> Forecast:
        """Forecast some shards, from `start` or now on. Raises QueryError for invalid values."""
        start = datetime.now(timezone.utc) if start is None else start
        try:
            if not (hours > 0 and 0 < buckets < CALL_LIMIT):
                raise ValueError
            step = timedelta(hours=hours) / buckets
            edges = [to_ms("start", start + step * n) for n in range(buckets + 1)]
        except (OverflowError, TypeError, ValueError) as error:
            raise QueryError(
                f"a forecast takes a number of hours, 1 to {CALL_LIMIT - 1} buckets and a "
                f"datetime to start from, not {hours!r}, {buckets!r} and {start!r}"
            ) from error
        found = cls.none(start, step, buckets)
        for shard in shards:
            overdue, *middle, later = Backlog(store, shard).forecast(edges)
            parts = [Bucket(start + step * n, step, count) for n, count in enumerate(middle)]
            found += cls(parts, overdue, later)
        return found

    @property
    def total(self) -> int:
        """All delayed tasks."""
        return self.overdue + sum(bucket.count for bucket in self.buckets) + self.later

    @classmethod
    def none(cls, start: datetime, length: timedelta, count: int) -> Forecast:
        return cls([Bucket(start + length * n, length, 0) for n in range(count)], 0, 0)

    def __add__(self, other: Forecast) -> Forecast:
        """The sum of two forecasts with the same buckets."""
        both = zip(self.buckets, other.buckets, strict=True)
        return Forecast(
            [Bucket(a.start, a.length, a.count + b.count) for a, b in both],
            self.overdue + other.overdue,
            self.later + other.later,
        )


def forecast_data(found: Forecast) -> dict[str, Any]:
    """The forecast in types that JSON can represent."""
    return {
        "total": found.total,
        "overdue": found.overdue,
        "later": found.later,
        "buckets": [
            {
                "start": each.start.isoformat(),
                "seconds": each.length.total_seconds(),
                "count": each.count,
            }
            for each in found.buckets
        ],
    }
