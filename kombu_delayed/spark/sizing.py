"""What the broker's servers can take, as measured: see docs/benchmarks.md."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: A Celery task without arguments as it lies in Redis.
RECORD_BYTES = 952

#: What a delayed message takes in Redis beyond itself.
BOOKKEEPING_BYTES = 162

EVENT_BYTES = 120

#: Messages that one server takes through their life in a second: schedule, deliver and ack.
NODE_RATE = 46_942

#: The same while it writes lifecycle events.
NODE_RATE_WITH_EVENTS = 27_361

#: From the due time to the start of a task by a worker with nothing else to do.
DELIVERY_SECONDS = 0.0021

#: What a task takes of its slot beyond its run time: a makespan of 1.03 with tasks of 20 ms.
TASK_SECONDS = 0.0006

#: Of a queue that is split over several servers, parts on each: one may have more work than others.
PARTS_PER_NODE = 4


@dataclass(frozen=True)
class Servers:
    """What a load takes: `nodes`, and into how many `shards` its messages have to be split."""

    nodes: int
    shards: int
    #: "rate" or "memory": what it takes so many for.
    because_of: str


def node_rate(events: bool) -> int:
    """Messages per second that one server takes through their life."""
    return NODE_RATE_WITH_EVENTS if events else NODE_RATE


def memory_bytes(messages: float, record_bytes: float, events: int = 0) -> float:
    """What so many delayed messages and `events` lifecycle events take in Redis."""
    return messages * (record_bytes + BOOKKEEPING_BYTES) + events * EVENT_BYTES


def servers_for(
    messages_per_second: float,
    memory_bytes: float,
    node_memory_bytes: float,
    events: bool,
    use: float,
) -> Servers:
    """The servers for a rate and an amount of memory, of which the share `use` may be used."""
    by_rate = math.ceil(messages_per_second / (node_rate(events) * use))
    by_memory = math.ceil(memory_bytes / (node_memory_bytes * use))
    nodes = max(by_rate, by_memory, 1)
    shards = nodes * PARTS_PER_NODE if nodes > 1 else 1
    return Servers(nodes, shards, "rate" if by_rate >= by_memory else "memory")
