"""Claims tasks of one queue for a program, in the exact order of their scores, then of due times.

A task has its score in a ticket, so that the scripts sort due tasks at the gate of their queue. A
task without a ticket (of version 0.1, or changed since) is read once and then gets one.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic
from typing import Any

from celery_ext.tasks.task_info import TaskInfo
from kombu_delayed.errors import MessageError
from kombu_delayed.message.envelope import Entry, open_envelope
from kombu_delayed.message.ticket import Gate, Ticket, put_ticket
from kombu_delayed.store.calls import instrumentation
from kombu_delayed.store.calls.scripts import Call
from kombu_delayed.store.calls.shards import queue_of
from kombu_delayed.store.claimable import Delivered
from kombu_delayed.store.store import Store

from ..api import cursors
from ..callbacks.jobs import job_of
from ..service.create_once import OnceStore
from ..service.service import Service
from .topics import owner_of

#: Scores are from -LIMIT to LIMIT. Redis sorts by floats, which are exact up to here.
LIMIT = 2**51

#: The gate of these tickets. No consumer declares it, so that servers of version 0.1 may poll, too.
GATE = Gate("http-score")

#: How many tasks one call brings to the gate, and how many one call reads to give them tickets.
BRING, READ = 2_000, 250

#: How long a claim sorts. Tasks that are left are out of order until the next claim.
SORT_SECONDS = 5.0


def ticket_of(id: str, score: int) -> str:
    """The ticket with which a task waits for its turn."""
    return Ticket(rank=score).text(GATE.version, id)


def score_in(job: dict[str, Any]) -> int:
    """The score of a task; 0 for one that has none."""
    score = job.get("score")
    return max(-LIMIT, min(score, LIMIT)) if type(score) is int else 0


class ScoredStore(OnceStore):
    """Accepts a task once, and gives it its ticket."""

    score = 0

    def schedule_call(self, queue: str, entries: Sequence[Entry], expires_ms: int = 0) -> Call:
        """As in any store, with tickets."""
        return super().schedule_call(queue, [*map(self._with_ticket, entries)], expires_ms)

    def _with_ticket(self, entry: Entry) -> Entry:
        return entry._replace(message=put_ticket(entry.message, ticket_of(entry.id, self.score)))


def new_name() -> str:
    """A new name for a consumer: see `HTTP_CONSUMER`. The zeros are missing in version 0.1."""
    return f"http:{os.getpid()}:00000000{secrets.token_hex(12)}"


def begin_lease(store: Store, shard: str, consumer: str, lease_ms: int) -> None:
    """Begin or extend the lease of a consumer, without claiming anything."""
    store.deliver(shard, consumer, 0, 1, lease_ms=lease_ms, waits=False, promotions=0)


class Claim:
    """A consumer of one shard, for one answer. It leaves at the end if it has claimed nothing."""

    def __init__(self, service: Service, shard: str, lease_ms: int) -> None:
        self._app, self._store = service.app, service.delayed.store
        self._shard, self._queue, self._lease_ms = shard, queue_of(shard), lease_ms
        self._name, self._tag, self._has_some = new_name(), 1, False

    def __enter__(self) -> Claim:
        # Not with a gated call, which would keep servers of version 0.1 from polling.
        begin_lease(self._store, self._shard, self._name, self._lease_ms)
        return self

    def __exit__(self, *error: object) -> None:
        if not self._has_some:
            self._store.leases.leave(self._shard, self._name)

    @staticmethod
    def is_unsorted(store: Store, shard: str) -> bool:
        """Returns whether some due or ready task does not wait at the gate."""
        size = store.size(shard, with_delayed=False)
        return bool(size.ready) or size.due > store.run("ZCARD", store.keys(shard).waiting)

    def take(self, most: int) -> list[tuple[TaskInfo, str]]:
        """Claim the next tasks, each with the text that acknowledges it."""
        got = self._deliver(most)
        if got.more and self.is_unsorted(self._store, self._shard):
            self._put_back(got.records)
            self.sort()
            got = self._deliver(most)
        return self._opened(got)

    def sort(self) -> None:
        """Bring all due tasks to the gate; tasks of another topic move to that topic's queue."""
        until = monotonic() + SORT_SECONDS
        while monotonic() < until and self.is_unsorted(self._store, self._shard):
            got = self._deliver(0)
            if got.paused:
                return
            size = self._store.size(self._shard, with_delayed=False)
            key = self._store.keys(self._shard).waiting
            if size.ready and size.due <= self._store.run("ZCARD", key):
                self._put_back(self._deliver(READ, gate=None, promotions=0).records)

    def _deliver(self, want: int, **more: Any) -> Delivered:
        given = {"gate": GATE, "promotions": BRING, **more}
        got = self._store.deliver(
            self._shard,
            self._name,
            want,
            self._tag,
            lease_ms=self._lease_ms,
            leased=True,
            waits=False,
            **given,
        )
        if got is None:  # its lease has expired meanwhile
            return Delivered(0, 0, False, 0, [])
        self._tag += len(got.records)
        return got

    def _tagged(self, records: Sequence[bytes]) -> list[tuple[int, bytes]]:
        """The records of the last call, with their tags."""
        return [*enumerate(records, self._tag - len(records))]

    def _put_back(self, records: Sequence[bytes]) -> None:
        entries = []
        for tag, record in self._tagged(records):
            if (info := self._info(tag, record)) and not self._has_moved(tag, info):
                job = job_of(self._app, info)
                entries.append((tag, ticket_of(info.id, score_in(job)), b""))
        if entries:
            self._store.admit(self._shard, self._name, entries, GATE)

    def _opened(self, got: Delivered) -> list[tuple[TaskInfo, str]]:
        found = []
        for tag, record in self._tagged(got.records):
            info = self._info(tag, record)
            if info is None or self._has_moved(tag, info):
                continue
            if (meter := instrumentation.current) is not None:
                since_ms = max(info.due_ms or 0, got.resumed_ms)
                late_seconds = None if info.due_ms is None else (got.now_ms - since_ms) / 1000
                meter.delivered(self._queue, late_seconds, info.deliveries)
            found.append((info, cursors.write(self._shard, self._name, tag)))
        self._has_some = bool(found)
        return sorted(found, key=lambda each: score_in(job_of(self._app, each[0])))

    def _info(self, tag: int, record: bytes) -> TaskInfo | None:
        """A task that was claimed; None: it could not be read, and was buried."""
        record = self._store.readable(self._shard, record)
        try:
            envelope = open_envelope(record[1:], tag)
        except MessageError as error:
            letter = tag, f"{self._name}-{tag}", str(error), b""
            self._store.bury(self._shard, self._name, [letter])
            return None
        step, due_ms = record[0] - 48, envelope.due_ms
        info = TaskInfo("unacked", self._queue, step, record[1:], due_ms, self._name)
        return replace(info, member=envelope.id)

    def _has_moved(self, tag: int, info: TaskInfo) -> bool:
        """Move a task that belongs to another topic, by the names of version 0.1, to its queue.

        Returns whether it was moved. A process that dies in between leaves two copies.
        """
        job = job_of(self._app, info)
        owner = owner_of(self._queue, job)
        if owner is None or owner.queue == self._queue:
            return False
        text = put_ticket(
            info.message.decode(errors="surrogateescape"), ticket_of(info.id, score_in(job))
        )
        home = self._store.shards.place(owner.queue, info.id)
        self._store.publish(home, [Entry(info.id, info.step, text)])
        self._store.ack(self._shard, self._name, [tag], lambda: None)
        self._store.run.settle()
        return True
