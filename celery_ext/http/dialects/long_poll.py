"""Hands out tasks over HTTP: a program claims them for a time, and acknowledges them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from math import inf
from time import monotonic
from typing import NamedTuple

from celery_ext.tasks.task_info import TaskInfo
from kombu_delayed.consumer.lease.consumer_id import HTTP_CONSUMER, silence_seconds
from kombu_delayed.consumer.lease.contact import (
    CLOCK_TOLERANCE,
    CLOCK_TOLERANCE_SECONDS,
    LONGEST_SILENCE,
)
from kombu_delayed.inspection.gate_usage import server_ms
from kombu_delayed.store.calls.shards import queue_of
from kombu_delayed.store.store import Store

from ..api import cursors
from ..problems import Problem
from ..service.service import Service
from .claims import Claim, begin_lease, new_name
from .topics import PREFIX, QUOTED_PREFIX, Topic

#: How often a waiting program renews its lease, how long that lease lasts, and how long the lease
#: lasts that sorts the tasks of an old queue.
SHOW_SECONDS, WAITING_MS, SORTING_MS = 4.0, 15_000, 60_000

#: How often the programs that wait for tasks of a shard look for expired leases, all together.
LEASES_SECONDS = 1.0

#: How often a waiting program looks for tasks, and how many looks a second all of them share.
INTERVAL_SECONDS, LOOKS = 0.25, 400


class Held(NamedTuple):
    """A task that was handed out: its shard, its consumer and its tag."""

    shard: str
    consumer: str
    tag: int

    @property
    def queue(self) -> str:
        return queue_of(self.shard)


def read_ack(text: str) -> Held:
    """Read a text that `claim` gave. Raises a Problem for any other, such as a worker's task."""
    try:
        held = Held(*cursors.read(text, str, str, int))
    except Problem:
        held = None
    if (
        held is None
        or not held.queue.startswith((PREFIX, QUOTED_PREFIX))
        or not HTTP_CONSUMER.fullmatch(held.consumer)
    ):
        raise Problem.of_field("acks", "this server has not issued it")
    return held


def interval(waiting: int) -> float:
    """The seconds between two looks of a program, when this number of programs waits."""
    return max(INTERVAL_SECONDS, waiting / LOOKS)


def claim(
    service: Service, topics: Sequence[Topic], most: int, lease_ms: int, *, again: bool = False
) -> list[tuple[TaskInfo, str]]:
    """Claim due tasks, each with the text that acknowledges it, from the first topic that has some.

    The lowest score of a topic goes first, then the task that was due first. `again` is for a
    program that has looked before, and waits.
    """
    store = service.delayed.store
    for topic in topics:
        for shard in store.shards.all(topic.old_queue) if topic.old_queue else ():
            if Claim.is_unsorted(store, shard):
                with Claim(service, shard, SORTING_MS) as others:
                    others.sort()
        for shard in store.shards.all(topic.queue):
            if _is_time(service, shard) or not again:
                _reclaim(store, shard)
            size = store.size(shard, with_delayed=False)
            if size.ready + size.due:
                with Claim(service, shard, lease_ms) as mine:
                    if found := mine.take(most):
                        return found
    return []


def _is_time(service: Service, shard: str) -> bool:
    """Whether to look for expired leases. Each look reads the leases of all who wait."""
    now = monotonic()
    if now - service.looked_at.get(shard, -inf) < LEASES_SECONDS:
        return False
    service.looked_at[shard] = now
    return True


class Waiting:
    """Shows in the metrics that a program waits for tasks of some topics."""

    def __init__(self, service: Service, topics: Iterable[Topic]) -> None:
        self._store = service.delayed.store
        self._queues = [topic.queue for topic in topics]
        self._name = new_name()
        self._shown_at = -inf

    @property
    def is_shown(self) -> bool:
        """Whether `end` must be called."""
        return self._shown_at > -inf

    @property
    def must_show(self) -> bool:
        """Whether it is time to call `show`."""
        return monotonic() - self._shown_at >= SHOW_SECONDS

    def show(self) -> None:
        """Show that the program waits, for a while."""
        self._shown_at = monotonic()
        for shard in self._shards():
            begin_lease(self._store, shard, self._name, WAITING_MS)

    def end(self) -> None:
        """Show that the program waits no longer: it has its answer."""
        for shard in self._shards():
            self._store.leases.leave(shard, self._name)

    def _shards(self) -> list[str]:
        return [shard for queue in self._queues for shard in self._store.shards.all(queue)]


class Ended(NamedTuple):
    """A worker's lease that has expired by the server's clock, and was not renewed since."""

    end: bytes
    #: How long it was watched; the time between two looks counts as half a lease at most.
    watched_seconds: float
    looked_at: float
    #: How far the server's clock was ahead of ours.
    ahead_seconds: float


#: Expired leases, by shard and worker. The end alone proves nothing: the clock may have been set.
_ended: dict[tuple[str, str], Ended] = {}


def _reclaim(store: Store, shard: str) -> None:
    ends = store.leases.ends(shard)
    known = {name for name, _ in ends}
    for each in tuple(_ended):
        if each[0] == shard and each[1] not in known:  # another server has reclaimed it
            _ended.pop(each, None)
    for name, left_ms in ends:
        seconds = silence_seconds(name)
        if left_ms > 0:
            _ended.pop((shard, name), None)
        elif not seconds:
            store.leases.reclaim(shard, name)
        elif (end := _silent_since_its_end(store, shard, name, seconds)) is not None:
            store.leases.reclaim(shard, name, end)


def _silent_since_its_end(store: Store, shard: str, name: str, seconds: float) -> int | None:
    """When the lease of a worker expired, if it was then watched for the length of a lease.

    0: it has no lease. None: the worker may be alive.
    """
    now, end = monotonic(), store.run("ZSCORE", store.keys(shard).consumers, name)
    known = _ended.get((shard, name))
    if end is None or float(end) == 0:
        return 0
    ahead = server_ms(store, shard) / 1000 - now
    tolerance = max(CLOCK_TOLERANCE_SECONDS, seconds * CLOCK_TOLERANCE)
    if known is None or known.end != end or abs(ahead - known.ahead_seconds) > tolerance:
        known = Ended(end, 0.0, now, ahead)
    # Between two looks nobody may have reached the server: a long gap says little about the worker.
    watched = known.watched_seconds + min(now - known.looked_at, seconds * LONGEST_SILENCE)
    _ended[shard, name] = known._replace(watched_seconds=watched, looked_at=now)
    if watched < seconds:
        return None
    _ended.pop((shard, name), None)  # two polls may look at once
    return int(float(end))


def ack(service: Service, held: Iterable[Held]) -> int:
    """Acknowledge tasks; returns how many of them were still held."""
    store, count = service.delayed.store, 0
    for shard, consumer, tag in held:
        unacked = store.keys(shard).unacked(consumer)
        end_ms = store.run("ZSCORE", store.keys(shard).consumers, consumer) or 0
        if float(end_ms) <= server_ms(store, shard) or not store.run("HEXISTS", unacked, tag):
            continue
        failed: list[bool] = []
        store.ack(shard, consumer, [tag], partial(failed.append, True))
        store.run.settle()
        count += not failed
        if not store.run("EXISTS", unacked):
            store.leases.leave(shard, consumer)
    return count
