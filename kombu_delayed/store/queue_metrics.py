"""The metrics of a queue for a control plane, such as an autoscaler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, NamedTuple

#: From now: the next minute, hour and day.
SPANS_MS = (60_000, 3_600_000, 86_400_000)

#: How many partitions, and how many buckets of messages, one call counts.
COUNT_LIMIT = 1_000


class Size(NamedTuple):
    """A queue's messages by state; `due` counts those of `delayed` that are due."""

    ready: int
    due: int
    delayed: int


@dataclass(frozen=True)
class Metrics:
    """A queue, or one of its shards, at one moment of the server's clock."""

    #: Messages in the backlog, due or not.
    delayed: int
    #: How many of these are due; the next claim promotes them, or they wait at the gate.
    due: int
    #: Messages in the ready lists.
    ready: int
    #: Messages that consumers hold, including consumers whose lease has expired.
    unacked: int
    #: Dead letters.
    dead: int
    #: Consumers with a lease. For a queue with several shards, the highest number of a shard.
    consumers: int
    #: How long ago the oldest message without a consumer was due; 0 if none is late. Considers the
    #: `due` messages, and the first message of each ready list if it was delayed.
    oldest_due_seconds: float
    #: Time until the next message is due that is not due yet; None if there is none.
    next_due_seconds: float | None
    #: Messages that are not due yet and will be within 60 s. The hour includes the minute.
    due_within_minute: int
    due_within_hour: int
    due_within_day: int
    #: Whether counts are partly estimates. Behind the first 1,000 partitions (some 90,000
    #: messages), `due` and the three counts above use the average size of all later partitions.
    #: Above some 200 MB of messages, `delayed` is counted in a part of the buckets.
    is_estimate: bool
    #: How many of `due` wait at the gate of their queue, for their turn or for capacity.
    waiting: int = 0
    #: How long ago the oldest of these was due; 0 if none waits.
    oldest_waiting_seconds: float = 0.0
    #: Whether the queue is paused. While it is, none of its messages count as late.
    paused: bool = False

    @classmethod
    def of(cls, answer: Sequence[int]) -> Metrics:
        """Read the answer of `metrics.lua`, in which -1 ms stands for none."""
        delayed, due, waiting, *held, oldest_ms, next_ms, is_estimate = answer[:10]
        waiting_ms, is_paused, *within = answer[10:]
        next_seconds = next_ms / 1000 if next_ms >= 0 else None
        found: list[Any] = [delayed, due, *held, max(oldest_ms, 0) / 1000, next_seconds, *within]
        found += [bool(is_estimate), waiting, max(waiting_ms, 0) / 1000, bool(is_paused)]
        return cls(*found)


def _soonest(seconds: Iterable[float | None]) -> float | None:
    return min((each for each in seconds if each is not None), default=None)


#: How the numbers of shards make that of their queue; all others are summed.
_FOLDS: dict[str, Callable[[Iterable[Any]], Any]] = {
    "consumers": max,
    "oldest_due_seconds": max,
    "next_due_seconds": _soonest,
    "is_estimate": any,
    "oldest_waiting_seconds": max,
    "paused": any,
}


def fold(shards: Iterable[Metrics]) -> Metrics:
    """The metrics of a queue from those of its shards, of which there must be at least one."""
    columns = zip(*map(astuple, shards), strict=True)
    return Metrics(
        *(
            _FOLDS.get(field.name, sum)(column)
            for field, column in zip(fields(Metrics), columns, strict=True)
        )
    )
