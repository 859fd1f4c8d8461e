"""Tasks that a program gets over HTTP: claimed for a time, and acked."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Sequence
from functools import partial
from time import monotonic
from typing import NamedTuple

from celery_ext.tasks.task_info import TaskInfo
from kombu_delayed.consumer.lease.contact import (
    CLOCK_TOLERANCE,
    CLOCK_TOLERANCE_SECONDS,
    LONGEST_SILENCE,
)
from kombu_delayed.errors import MessageError
from kombu_delayed.inspection.silence import HTTP_CONSUMER, silence_seconds
from kombu_delayed.message.envelope import open_envelope
from kombu_delayed.store import instrumentation
from kombu_delayed.store.claimable import Delivered
from kombu_delayed.store.shards import queue_of
from kombu_delayed.store.store import Store

from ..api import cursors
from ..problems import Problem
from ..service.service import Service


class Held(NamedTuple):
    """A task that was handed out: of which shard, to which consumer, under which tag."""

    shard: str
    consumer: str
    tag: int

    @property
    def queue(self) -> str:
        return queue_of(self.shard)


def read_ack(text: str) -> Held:
    """What `claim` gave, and nothing of a worker's. Raises a Problem."""
    try:
        held = Held(*cursors.read(text, str, str, int))
    except Problem:
        held = None
    if (
        held is None
        or not held.queue.startswith("http.")
        or not HTTP_CONSUMER.fullmatch(held.consumer)
    ):
        raise Problem.of_field("acks", "it is not one that this server has given")
    return held


def claim(
    service: Service, queues: Sequence[str], most: int, lease_ms: int
) -> list[tuple[TaskInfo, str]]:
    """Tasks that are due, each with what acks it, from the first queue that has some."""
    store = service.delayed.store
    for shard in (shard for queue in queues for shard in store.shards.all(queue)):
        _reclaim(store, shard)
        size = store.size(shard)
        if not size.ready + size.due:
            continue
        consumer = f"http:{os.getpid()}:{secrets.token_hex(16)}"
        got = store.deliver(shard, consumer, most, 1, lease_ms=lease_ms, waits=False)
        if got is None or not got.records:
            store.leases.leave(shard, consumer)
            continue
        return _opened(store, shard, consumer, got)
    return []


class Ended(NamedTuple):
    """A worker's lease that has ended by the server's clock, and was not renewed since."""

    end: bytes
    #: For how long it was watched: between two looks half a lease at the most.
    watched_seconds: float
    looked_at: float
    #: How far the server's clock was ahead of ours.
    ahead_seconds: float


#: By shard and worker. Its end alone says nothing: the clock may have been set.
_ended: dict[tuple[str, str], Ended] = {}


def _reclaim(store: Store, shard: str) -> None:
    for name, left_ms, _ in store.leases.consumers(shard):
        seconds = silence_seconds(name)
        if left_ms > 0:
            _ended.pop((shard, name), None)
        elif not seconds:
            store.leases.reclaim(shard, name)
        elif (end := _silent_since_its_end(store, shard, name, seconds)) is not None:
            store.leases.reclaim(shard, name, end)


def _silent_since_its_end(store: Store, shard: str, name: str, seconds: float) -> int | None:
    """When the lease of a worker ended that was watched for a whole one; None: it may live."""
    now, end = monotonic(), store.run("ZSCORE", store.keys(shard).consumers, name)
    known = _ended.get((shard, name))
    if end is None or float(end) == 0:
        return 0
    ahead = _server_seconds(store, shard) - now
    tolerance = max(CLOCK_TOLERANCE_SECONDS, seconds * CLOCK_TOLERANCE)
    if known is None or known.end != end or abs(ahead - known.ahead_seconds) > tolerance:
        known = Ended(end, 0.0, now, ahead)
    # Nobody may have reached the server between two looks: a long gap says little of the worker.
    watched = known.watched_seconds + min(now - known.looked_at, seconds * LONGEST_SILENCE)
    _ended[shard, name] = known._replace(watched_seconds=watched, looked_at=now)
    if watched < seconds:
        return None
    del _ended[shard, name]
    return int(float(end))


def _server_seconds(store: Store, shard: str) -> float:
    if store.now:
        return int(store.now) / 1000
    seconds, microseconds = store.run.to(("GET", store.keys(shard).consumers))("TIME")
    return int(seconds) + int(microseconds) / 1_000_000


def _opened(store: Store, shard: str, consumer: str, got: Delivered) -> list[tuple[TaskInfo, str]]:
    found = []
    for tag, record in enumerate(got.records, 1):
        try:
            envelope = open_envelope(record[1:], tag)
        except MessageError as error:
            store.bury(shard, consumer, [(tag, f"{consumer}-{tag}", str(error), b"")])
            continue
        queue, step, due_ms = queue_of(shard), record[0] - 48, envelope.due_ms
        if (told := instrumentation.current) is not None:
            since_ms = max(due_ms or 0, got.resumed_ms)
            late_seconds = None if due_ms is None else (got.now_ms - since_ms) / 1000
            told.delivered(queue, late_seconds, envelope.deliveries)
        info = TaskInfo("unacked", queue, step, record[1:], due_ms, consumer)
        found.append((info, cursors.write(shard, consumer, tag)))
    return found


def ack(service: Service, held: Iterable[Held]) -> int:
    """Forget tasks for good; returns how many were still held."""
    store, count = service.delayed.store, 0
    for shard, consumer, tag in held:
        unacked = store.keys(shard).unacked(consumer)
        is_leased = any(
            name == consumer and left_ms > 0 for name, left_ms, _ in store.leases.consumers(shard)
        )
        if not is_leased or not store.run("HEXISTS", unacked, tag):
            continue
        failed: list[bool] = []
        store.ack(shard, consumer, [tag], partial(failed.append, True))
        store.run.settle()
        count += not failed
        if not store.run("EXISTS", unacked):
            store.leases.leave(shard, consumer)
    return count
