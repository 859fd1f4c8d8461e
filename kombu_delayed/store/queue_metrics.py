"""What a control plane, such as an autoscaler, needs to know of a queue."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: From now: the next minute, hour and day.
SPANS_MS = (60_000, 3_600_000, 86_400_000)


@dataclass(frozen=True)
class Metrics:
    """A queue, or one of its shards, at one moment of the server's clock."""

    #: Messages in the backlog, due or not.
    delayed: int
    #: Of these, those whose due time has come; the next claim promotes them, or they wait.
    due: int
    #: Messages in the ready lists.
    ready: int
    #: Messages that consumers hold, also those whose lease has ended.
    unacked: int
    #: Dead letters.
    dead: int
    #: Consumers whose lease lasts. Of all shards: as many as the one with the most has.
    consumers: int
    #: How long ago the oldest message was due that no consumer has; 0 where none is late. Looked at
    #: are what is `due`, and the message in front of each ready list if it was delayed.
    oldest_due_seconds: float
    #: Until the next message is due that is not due yet; None where there is none.
    next_due_seconds: float | None
    #: Messages that are not due yet and will be within 60 s. The hour has those of the minute.
    due_within_minute: int
    due_within_hour: int
    due_within_day: int
    #: Whether `due` and those within a time are, of what is due behind the first 1,000 partitions
    #: (some 90,000 messages), estimated from how full all later ones are on average.
    is_estimate: bool
    #: Of `due`, those that wait at the gate of their queue, for their turn or room within limits.
    waiting: int = 0
    #: How long ago the oldest of these was due; 0 where none waits.
    oldest_waiting_seconds: float = 0.0
    #: Whether the queue is paused: nothing of it counts as late then.
    paused: bool = False

    @classmethod
    def of(
        cls,
        delayed: int,
        due: int,
        waiting: int,
        ready: int,
        unacked: int,
        dead: int,
        consumers: int,
        oldest_due_ms: int,
        next_due_ms: int,
        is_estimate: int,
        oldest_waiting_ms: int,
        is_paused: int,
        due_within_minute: int,
        due_within_hour: int,
        due_within_day: int,
    ) -> Metrics:
        """From the answer of `metrics.lua`, in which -1 ms stands for none."""
        return cls(
            delayed,
            due,
            ready,
            unacked,
            dead,
            consumers,
            max(oldest_due_ms, 0) / 1000,
            next_due_ms / 1000 if next_due_ms >= 0 else None,
            due_within_minute,
            due_within_hour,
            due_within_day,
            bool(is_estimate),
            waiting,
            max(oldest_waiting_ms, 0) / 1000,
            bool(is_paused),
        )


def fold(shards: Iterable[Metrics]) -> Metrics:
    """The metrics of a queue from those of its shards, of which there is one at least."""
    found = [*shards]
    ahead = [each.next_due_seconds for each in found if each.next_due_seconds is not None]
    return Metrics(
        delayed=sum(each.delayed for each in found),
        due=sum(each.due for each in found),
        waiting=sum(each.waiting for each in found),
        ready=sum(each.ready for each in found),
        unacked=sum(each.unacked for each in found),
        dead=sum(each.dead for each in found),
        consumers=max(each.consumers for each in found),
        oldest_due_seconds=max(each.oldest_due_seconds for each in found),
        next_due_seconds=min(ahead, default=None),
        due_within_minute=sum(each.due_within_minute for each in found),
        due_within_hour=sum(each.due_within_hour for each in found),
        due_within_day=sum(each.due_within_day for each in found),
        is_estimate=any(each.is_estimate for each in found),
        oldest_waiting_seconds=max(each.oldest_waiting_seconds for each in found),
        paused=any(each.paused for each in found),
    )
