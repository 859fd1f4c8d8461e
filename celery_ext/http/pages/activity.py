"""Recent throughput and lateness, from the lifecycle events."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from kombu.utils.functional import LRUCache

from kombu_delayed.inspection import events as streams
from kombu_delayed.inspection.events import Event
from kombu_delayed.store.store import Store

#: The length of one part of the throughput chart, and the number of parts.
PART_SECONDS, PARTS = 15, 40

#: How many events of a shard the first look reads, and how many each later look reads at most.
FIRST_SIZE, LOOK_SIZE = 5_000, 10_000

#: For how many of the last deliveries of a shard the lateness is kept.
LATENESS_SIZE = 1_000

#: How many streams are followed: for one look, and for all visitors.
FOLLOWED, REMEMBERED = 1_000, 3_000


@dataclass(frozen=True)
class Activity:
    """The activity of the last ten minutes. `parts` are the tasks that were done in each 15 s.

    Lateness is the time from due to delivered, in seconds, of the last deliveries; None: there was
    none. `is_partial`: not all events were read. `has_events`: there are events at all.
    """

    parts: list[int]
    delivered: int
    done: int
    late_half: float | None
    late_most: float | None
    late_worst: float | None
    is_partial: bool
    has_events: bool


@dataclass
class _Followed:
    position: str = ""
    done: Counter[int] = field(default_factory=Counter)
    delivered: Counter[int] = field(default_factory=Counter)
    lateness: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=LATENESS_SIZE))
    partial_until: int = -1

    def add(self, event: Event, resumed_ms: int) -> None:
        part = event.at_ms // (PART_SECONDS * 1000)
        if event.event == "acked":
            self.done[part] += 1
        elif event.event == "delivered":
            self.delivered[part] += 1
            if event.due_ms is not None:
                late_ms = event.at_ms - max(event.due_ms, resumed_ms)
                self.lateness.append((part, max(late_ms, 0) / 1000))

    def forget_before(self, part: int) -> None:
        for counter in (self.done, self.delivered):
            for old in [each for each in counter if each < part]:
                del counter[old]


class ActivityReader:
    """Follows streams of events as long as there are visitors; each look reads the new events."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._followed: Any = LRUCache(REMEMBERED)

    def look(self, store: Store, shards: list[str]) -> Activity:
        """The activity of some shards in the last ten minutes."""
        last = int(time.time()) // PART_SECONDS
        parts = range(last - PARTS, last)  # the present part would look like a standstill
        with self._lock:
            found = [self._read(store, shard, last) for shard in shards[:FOLLOWED]]
        late = sorted(s for each in found for part, s in each.lateness if part >= parts[0])
        return Activity(
            [sum(each.done[part] for each in found) for part in parts],
            _lately([each.delivered for each in found], last),
            _lately([each.done for each in found], last),
            late[len(late) // 2] if late else None,
            late[int(len(late) * 0.95)] if late else None,
            late[-1] if late else None,
            any(each.partial_until > last - PARTS for each in found),
            any(each.position for each in found),
        )

    def _read(self, store: Store, shard: str, last: int) -> _Followed:
        followed: _Followed = self._followed.setdefault(shard, _Followed())
        followed.forget_before(last - PARTS)
        if not followed.position:
            events = streams.newest(store, shard, FIRST_SIZE)
            if len(events) == FIRST_SIZE:
                followed.partial_until = events[0].at_ms // (PART_SECONDS * 1000)
        else:
            events = []
            for page in streams.pages(store, shard, followed.position):
                events += page
                if len(events) >= LOOK_SIZE:
                    followed.partial_until = last
                    events += streams.newest(store, shard)
                    break
        resumed_ms = store.pauses.resumed_ms(shard) if events else 0
        for event in events:
            followed.add(event, resumed_ms)
        if events:
            followed.position = events[-1].stream_id
        return followed


def _lately(counters: list[Counter[int]], last: int) -> int:
    """The sum of the counters over the last whole minute."""
    parts = range(last - 60 // PART_SECONDS, last)
    return sum(counter[part] for counter in counters for part in parts)
