"""A move that dies at each of its commands, and the process that takes over."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import redis

from kombu_delayed.store.store import Entry, Store
from tests.crash.dying import CUTS, Killed, dying_store
from tests.kit.state import message

NOW_MS = 1_000_000
DUE_MS = NOW_MS + 5_000
LEASE_MS = 30_000
LATER_MS = NOW_MS + LEASE_MS
MANY = [str(n) for n in range(7)]

Move = Callable[[Store], None]


@dataclass(frozen=True)
class Case:
    move: Move
    setup: Move = lambda store: None
    #: The process that died was a producer: messages that it had not sent are lost.
    publishes: bool = False
    event_limit: int = 0


def task(id: str, due: int | str = "") -> Entry:
    """A message whose events have its id."""
    return Entry(id, 0, message(id, headers={"id": id}), str(due))


def publish(store: Store) -> None:
    store.publish("q", [task(id) for id in MANY])


def schedule(store: Store) -> None:
    store.schedule("q", [task(id, DUE_MS) for id in MANY])


def deliver(store: Store, consumer: str = "A", want: int = 9) -> list[str]:
    answer = store.deliver("q", consumer, want, 1, lease_ms=LEASE_MS)
    assert answer is not None
    return [json.loads(record[1:])["body"] for record in answer.records]


def held(store: Store) -> None:
    publish(store)
    deliver(store)


def ack(store: Store, *tags: int) -> None:
    for tag in tags:
        store.ack("q", "A", [tag], on_error=lambda: pytest.fail("an ack was refused"))


def park(store: Store) -> None:
    store.park("q", "A", [(1, "0", DUE_MS), (2, "1", DUE_MS)])
    store.park("q", "A", [(3, "2", DUE_MS)])


def bury(store: Store) -> None:
    for tag in (1, 2, 3):
        store.bury("q", "A", [(tag, MANY[tag - 1], "{}", b"")])


def buried(store: Store) -> None:
    """All are dead letters, and their consumer has left."""
    held(store)
    store.bury("q", "A", [(tag, id, "{}", b"") for tag, id in enumerate(MANY, 1)])
    store.leases.leave("q", "A")


def living_store(client: redis.Redis, case: Case) -> Store:
    return Store(client, now=str(NOW_MS), event_limit=case.event_limit)


def steps(client: redis.Redis, case: Case) -> int:
    """How many commands the whole move takes."""
    client.flushall()
    client.script_flush()
    case.setup(living_store(client, case))
    client.script_flush()
    store = dying_store(client, NOW_MS)
    store.event_limit = case.event_limit
    case.move(store)
    return store.run.sent


def die(client: redis.Redis, case: Case, at: int, cut: str) -> None:
    client.flushall()
    case.setup(living_store(client, case))
    client.script_flush()  # each first call is answered NOSCRIPT: one more step to die at
    store = dying_store(client, NOW_MS, at, cut)
    store.event_limit = case.event_limit
    with pytest.raises(Killed):
        case.move(store)


def every_death(client: redis.Redis, case: Case) -> Iterator[tuple[int, str]]:
    for at in range(1, steps(client, case) + 1):
        for cut in CUTS:
            die(client, case, at, cut)
            yield at, cut
            # The dead process does not give back its connections.
            client.connection_pool.disconnect()
            client.connection_pool.reset()


def inherit(client: redis.Redis, consumer: str = "B", now_ms: int = 10 * LATER_MS) -> Counter[str]:
    """Another consumer takes over after all leases have expired; returns its deliveries by body."""
    store = Store(client, now=str(now_ms))
    bodies = deliver(store, consumer, 0)
    for dead in store.leases.renew("q", consumer, LEASE_MS) or []:
        store.leases.reclaim("q", dead)
    while found := deliver(store, consumer):
        bodies += found
        store.client.delete(store.keys("q").unacked(consumer))
    return Counter(bodies)


def dead_letters(client: redis.Redis) -> Counter[str]:
    records = client.hvals("{q}:dead-messages")
    return Counter(json.loads(record[1:])["body"] for record in records)


def unacked(client: redis.Redis, consumer: str = "A") -> Counter[str]:
    records = client.hvals("{q}:unacked:" + consumer)
    return Counter(json.loads(record[1:])["body"] for record in records)
