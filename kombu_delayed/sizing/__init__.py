"""What messages take of the broker's servers, as measured: see docs/operations.md.

Memory is that of a server with jemalloc, as Redis and Valkey are built on Linux, which rounds each
allocation up to one of its sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: A Celery task without arguments as it lies in Redis.
RECORD_BYTES = 952

#: Of a task's arguments Celery keeps so much once more, for people to read.
REPR_BYTES = 1_024

#: The part that is the same in all tasks. A large backlog does not store it with each of them.
COMMON_BYTES = 745

#: A compressed task without arguments, and what is left of each byte of these. That depends on the
#: arguments: these are of orders with names, amounts and a random token each.
COMPRESSED_BYTES = 150
COMPRESSED_SHARE = 0.18

#: In front of a record in the backlog: its due time, and the server's own.
HEAD_BYTES = 17

#: What a delayed message takes beyond its record: its id, twice, and its share of the tables.
BOOKKEEPING_BYTES = 145

EVENT_BYTES = 120

#: Processor time of a server for the life of a message: one call schedules it, claims and acks
#: are of eight. To it comes what the message's length takes, and what lifecycle events take.
MESSAGE_US = 44.0
EVENTS_US = 16.0
US_PER_BYTE = 0.004

#: From the due time to the start of a task by a worker with nothing else to do.
DELIVERY_SECONDS = 0.0021

#: What a task takes of its slot beyond its run time: a makespan of 1.03 with tasks of 20 ms.
TASK_SECONDS = 0.0006

#: Of a queue that is split over several servers, parts on each, at the least: one may have one more
#: than others, and more work.
PARTS_PER_NODE = 4


@dataclass(frozen=True)
class Servers:
    """What a load takes: `nodes`, and into how many `shards` its messages have to be split."""

    nodes: int
    shards: int
    #: "rate" or "memory": what it takes so many for.
    because_of: str


def record_bytes(payload_bytes: float) -> float:
    """A Celery task in Redis, of whose arguments there are so many bytes as JSON."""
    return RECORD_BYTES + payload_bytes * 4 / 3 + min(payload_bytes, REPR_BYTES)


def compressed_bytes(payload_bytes: float) -> float:
    """The same, compressed with a dictionary, as one of many in the backlog."""
    return COMPRESSED_BYTES + payload_bytes * COMPRESSED_SHARE


def message_bytes(
    record_bytes: float, jemalloc: bool = True, compressed_bytes: float | None = None
) -> float:
    """A delayed message in Redis, one of many, with all that is kept of it.

    It is packed, or compressed to so many bytes.
    """
    size = max(record_bytes - COMMON_BYTES, 0) + HEAD_BYTES
    if compressed_bytes is not None:
        size = compressed_bytes + 3  # the server's own
    return (allocated(math.ceil(size)) if jemalloc else size) + BOOKKEEPING_BYTES


def allocated(size_bytes: int) -> int:
    """What jemalloc takes for that: it has four sizes between one power of two and the next."""
    step = 16 if size_bytes <= 128 else 1 << ((size_bytes - 1).bit_length() - 3)
    return -(-size_bytes // step) * step


def memory_bytes(messages: float, record_bytes: float, events: int = 0) -> float:
    """What so many delayed messages and `events` lifecycle events take in Redis."""
    return messages * message_bytes(record_bytes) + events * EVENT_BYTES


def node_rate(events: bool, record_bytes: float = RECORD_BYTES) -> float:
    """Messages per second that one server takes through their life: schedule, deliver and ack."""
    return 1e6 / (MESSAGE_US + EVENTS_US * events + US_PER_BYTE * record_bytes)


def servers_for(
    messages_per_second: float,
    memory_bytes: float,
    node_memory_bytes: float,
    events: bool,
    use: float,
    record_bytes: float = RECORD_BYTES,
) -> Servers:
    """The servers for a rate and an amount of memory, of which the share `use` may be used."""
    by_rate = math.ceil(messages_per_second / (node_rate(events, record_bytes) * use))
    by_memory = math.ceil(memory_bytes / (node_memory_bytes * use))
    nodes = max(by_rate, by_memory, 1)
    return Servers(nodes, shards_for(nodes), "rate" if by_rate >= by_memory else "memory")


def shards_for(nodes: int) -> int:
    """Over how many shards a queue has to be spread that fills so many servers.

    Enough for each to have several; of 6, 12, 24, 48 …, which `shard_placement` spreads evenly.
    """
    if nodes == 1:
        return 1
    return int(3 * 2 ** math.ceil(math.log2(nodes * PARTS_PER_NODE / 3)))
