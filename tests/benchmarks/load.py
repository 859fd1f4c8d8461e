"""Producers and consumers that are nothing but stores, on servers whose processor time is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import redis

from kombu_delayed.store.store import Entry, Store
from tests.benchmarks.fill import store_of
from tests.benchmarks.rig import Rig

QUEUE = "load"

#: As many as a worker with two slots claims at once.
CLAIM = 8
CLIENTS = 16
LEASE_MS = 3_600_000
BEGIN_MS = 1_000

#: The store of a client for a shard.
Client = Callable[[str], Store]


class Nodes(Protocol):
    """The servers of a load."""

    def connect(self) -> Client:
        """Connect a new client: its stores go by the time `now` that they are given."""

    def cpu_seconds(self) -> list[float]:
        """Return the processor time of each server since its start."""

    def shards(self, count: int) -> Sequence[str]:
        """Spread the queue anew, over so many shards."""

    def by_server(self, shards: Sequence[str]) -> Sequence[Sequence[str]]:
        """The shards of each server that has some."""

    def close(self) -> None:
        """Disconnect all clients."""


@dataclass
class OneNode:
    """All shards on one server."""

    rig: Rig
    event_limit: int
    _count: int = 1
    _clients: list[redis.Redis] = field(default_factory=list)

    def connect(self) -> Client:
        store = store_of(self.rig)
        self._clients.append(self.rig.server.client())
        made = Store(
            self._clients[-1],
            partition_size=store.partition_size,
            event_limit=self.event_limit,
            shards=self._count,
        )
        return lambda shard: made

    def cpu_seconds(self) -> list[float]:
        found = self.rig.redis.info("cpu")
        return [found["used_cpu_user"] + found["used_cpu_sys"]]

    def shards(self, count: int) -> Sequence[str]:
        self._count = count
        # What is freed later by another thread would count as work on messages.
        self.rig.redis.execute_command("FLUSHALL", "SYNC")
        return self.connect()(QUEUE).shards.all(QUEUE)

    def by_server(self, shards: Sequence[str]) -> Sequence[Sequence[str]]:
        return [shards]

    def close(self) -> None:
        while self._clients:
            self._clients.pop().close()


@dataclass
class Load:
    """Messages, one due each millisecond, sent one by one and claimed as they fall due."""

    nodes: Nodes
    shards: Sequence[str]
    count: int
    text: str
    clients: list[Client] = field(init=False)

    def __post_init__(self) -> None:
        self.clients = [self.nodes.connect() for _ in range(CLIENTS)]

    def run(self) -> list[float]:
        """Take all messages through their life; returns µs of each server for one message.

        Servers have their share one after the other: where they are on one machine, each would
        find the processor's caches full of what the others did.
        """
        before = self.nodes.cpu_seconds()
        for shards in self.nodes.by_server(self.shards):
            self._consume(shards, self._produce(shards))
        spent = zip(self.nodes.cpu_seconds(), before, strict=True)
        self.nodes.close()
        return [(after - began) / self.count * 1e6 for after, began in spent]

    def _produce(self, shards: Sequence[str]) -> int:
        """Send the messages of some of the shards; returns how many these are."""
        sent = 0
        for n in range(self.count):
            id = f"{n:08}-1111-4222-8333-444444444444"
            client = self.clients[n % CLIENTS]
            store = client(QUEUE)
            store.now = str(BEGIN_MS)
            shard = store.shards.home(QUEUE, id)
            if shard not in shards:
                continue
            due_ms = BEGIN_MS + 1 + n * 7_919 % self.count
            client(shard).schedule(shard, [Entry(id, 0, self.text, str(due_ms))])
            sent += 1
        return sent

    def _consume(self, shards: Sequence[str], count: int) -> None:
        """Claim from each shard as often as if all had their turn."""
        left, claims, step_ms = count, 0, CLAIM * len(self.shards) / len(shards)
        leased: set[tuple[int, str]] = set()
        while left:
            number = claims % CLIENTS
            shard = shards[claims % len(shards)]
            claims += 1
            if claims > count + 100 * len(shards):
                raise RuntimeError(f"{left} of {count} messages were not delivered")
            store = self.clients[number](shard)
            store.now = str(BEGIN_MS + round(claims * step_ms))
            left -= self._claim(store, shard, number, claims, (number, shard) in leased)
            leased.add((number, shard))
        for client in self.clients:
            for shard in shards:
                client(shard).run.settle()

    def _claim(self, store: Store, shard: str, number: int, claims: int, leased: bool) -> int:
        """As who was woken by a token: take it, claim, ack."""
        store.run("ZPOPMIN", store.keys(shard).wake)
        tag = claims * CLAIM
        consumer = f"box:{number}:load"
        found = store.deliver(shard, consumer, CLAIM, tag, lease_ms=LEASE_MS, leased=leased)
        if found is None:
            raise RuntimeError(f"{consumer} has lost its lease on {shard!r}")
        count = len(found.records)
        if count:
            store.ack(shard, consumer, range(tag, tag + count), _refused)
        return count


def _refused() -> None:
    raise RuntimeError("an ack was refused")
