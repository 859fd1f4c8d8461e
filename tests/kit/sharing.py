"""A consumer of queues with global limits, without a worker around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import redis

from kombu_delayed.consumer.policy.shared_slots import SharedSlots
from kombu_delayed.store.store import Store

LEASE_MS = 10_000


class Lossy:
    """A store whose calls or answers may get lost, and that records all calls."""

    def __init__(self, store: Store) -> None:
        self.store = store
        #: "call", "answer" or nothing.
        self.loses = ""
        self.sent: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def together(self, calls: Any) -> Any:
        self.sent += calls
        if self.loses == "call":
            raise redis.ConnectionError("lost")
        answers = self.store.together(calls)
        if self.loses == "answer":
            raise redis.ConnectionError("lost")
        return answers


class SharingLease:
    """A lease reduced to its slots; it ends when a test says so."""

    ms, seconds = LEASE_MS, LEASE_MS / 1000

    def __init__(self, consumer: str, clock: Callable[[], float]) -> None:
        self.consumer = consumer
        self.clock = clock
        self.lost = False
        self.queues: set[str] = set()

    def holds(self, queue: str) -> bool:
        return queue in self.queues

    def grant(self, queue: str, asked: Any) -> None:
        self.queues.add(queue)

    def outlast_data(self, queue: str, store: Store, register: Any) -> Any:
        if store.leases.was_reclaimed(queue, self.consumer):
            return None
        return register()


class SharingConsumer:
    """The steps of a worker, one call each."""

    runs_here = False

    def __init__(self, store: Any, consumer: str, clock: Callable[[], float]) -> None:
        self.store: Any = store
        self.lease: Any = SharingLease(consumer, clock)
        self.shared = SharedSlots()
        self.tag = 0
        #: Queues of unanswered claims -> the last tag before the claim.
        self.unsure: dict[str, int] = {}

    @property
    def name(self) -> str:
        return str(self.lease.consumer)

    def claim(self, queue: str, gate: Any, want: int, is_lost: bool = False) -> list[Any]:
        """Claim messages; returns (tag, record) pairs, or nothing if the answer is lost."""
        seen, self.tag = self.tag, self.tag + want
        self.unsure[queue] = seen
        answer = self.store.deliver(
            queue,
            self.name,
            want,
            seen + 1,
            lease_ms=LEASE_MS,
            gate=gate,
            taken=self.shared.take(queue, gate, want),
        )
        self.lease.queues.add(queue)
        if is_lost:
            return []
        found = [*enumerate(answer.records, seen + 1)]
        self.got(queue, gate, found, answer.lacking)
        return found

    def recover(self, queue: str, gate: Any) -> list[Any]:
        """Returns the messages of a lost answer."""
        found = self.store.leases.recover(queue, self.name, self.unsure[queue])
        self.got(queue, gate, found, None)
        return [*found]

    def got(self, queue: str, gate: Any, found: Any, lacking: Any) -> None:
        for tag, record in found:
            self.shared.occupy(tag, queue, gate.global_slots(record))
        self.shared.claimed(queue, lacking)
        del self.unsure[queue]
