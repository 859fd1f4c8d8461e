"""The partitions of a backlog."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..connection.commands import scored
from ..store.store import CALL_LIMIT, Store


@dataclass(frozen=True)
class Partition:
    """A partition of the backlog: its lower bound in ms since the epoch and its messages."""

    name: str
    bound_ms: int
    count: int


def partitions(store: Store, queue: str, start: int = 0) -> Iterator[Partition]:
    """Yield the partitions of a queue in the order of their bounds, from number `start` on."""
    keys = store.keys(queue)
    while True:
        stop = start + CALL_LIMIT - 1
        found = scored(store.run("ZRANGE", keys.partitions, start, stop, "WITHSCORES"))
        for name, bound in found:
            count = store.run("ZCARD", keys.delayed.encode() + name)
            yield Partition(name.decode(errors="backslashreplace"), int(float(bound)), count)
        start += CALL_LIMIT
        if len(found) < CALL_LIMIT:
            return


def partition_count(store: Store, queue: str) -> int:
    """Return how many partitions a queue's backlog has."""
    count: int = store.run("ZCARD", store.keys(queue).partitions)
    return count
