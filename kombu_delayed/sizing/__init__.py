"""The measured costs of messages for the broker's servers: see docs/operations.md.

Memory is that of a server with jemalloc, as Redis and Valkey are built on Linux. It rounds each
allocation up to one of its sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: The size of a Celery task without arguments in Redis.
RECORD_BYTES = 952

#: How much of a task's arguments Celery stores a second time, in readable form.
REPR_BYTES = 1_024

#: The part that is the same in all tasks. A large backlog does not store it with each of them.
COMMON_BYTES = 745

#: The size of a compressed task without arguments, and the compressed share of its arguments. It
#: depends on the arguments: these were orders with names, amounts and a random token each.
COMPRESSED_BYTES = 150
COMPRESSED_SHARE = 0.18

#: The bytes before a record in the backlog: its due time, and the server's own header.
HEAD_BYTES = 17

#: The bytes of a delayed message beyond its record: its id, twice, and its share of the tables.
BOOKKEEPING_BYTES = 145

#: A lifecycle event in its stream: 126 to 135 bytes were measured.
EVENT_BYTES = 130

#: Processor time of a server for the life of a message: one call schedules it, and each claim or
#: ack is of eight messages. The message's length and lifecycle events cost extra.
MESSAGE_US = 44.0
EVENTS_US = 16.0
US_PER_BYTE = 0.004

#: From the due time to the start of a task by an idle worker.
DELIVERY_SECONDS = 0.0021

#: How long a task occupies its slot beyond its run time: a makespan of 1.03 with tasks of 20 ms.
TASK_SECONDS = 0.0006

#: The minimum number of parts on each server, for a queue that is split over several. With fewer,
#: a server that has one part more than others would have much more work.
PARTS_PER_NODE = 4


@dataclass(frozen=True)
class Servers:
    """The servers for a load: `nodes`, and how many `shards` its messages must be split into."""

    nodes: int
    shards: int
    #: "rate" or "memory": which of them requires this many.
    because_of: str


def record_bytes(payload_bytes: float) -> float:
    """Return the size of a Celery task in Redis, given the size of its arguments as JSON."""
    return RECORD_BYTES + payload_bytes * 4 / 3 + min(payload_bytes, REPR_BYTES)


def compressed_bytes(payload_bytes: float) -> float:
    """Return the same, compressed with a dictionary, for one of many in the backlog."""
    return COMPRESSED_BYTES + payload_bytes * COMPRESSED_SHARE


def message_bytes(
    record_bytes: float, jemalloc: bool = True, compressed_bytes: float | None = None
) -> float:
    """Return the memory of a delayed message in Redis, one of many, with all that belongs to it.

    It is packed, or compressed to `compressed_bytes`.
    """
    size = max(record_bytes - COMMON_BYTES, 0) + HEAD_BYTES
    if compressed_bytes is not None:
        size = compressed_bytes + 3  # the server's own header
    return (allocated(math.ceil(size)) if jemalloc else size) + BOOKKEEPING_BYTES


def allocated(size_bytes: int) -> int:
    """Return what jemalloc allocates for a size. It has four sizes for each power of two."""
    step = 16 if size_bytes <= 128 else 1 << ((size_bytes - 1).bit_length() - 3)
    return -(-size_bytes // step) * step


def memory_bytes(messages: float, record_bytes: float, events: int = 0) -> float:
    """Return the memory of `messages` delayed messages and `events` lifecycle events in Redis."""
    return messages * message_bytes(record_bytes) + events * EVENT_BYTES


def node_rate(events: bool, record_bytes: float = RECORD_BYTES) -> float:
    """Return how many messages per second one server can schedule, deliver and ack."""
    return 1e6 / (MESSAGE_US + EVENTS_US * events + US_PER_BYTE * record_bytes)


def servers_for(
    messages_per_second: float,
    memory_bytes: float,
    node_memory_bytes: float,
    events: bool,
    use: float,
    record_bytes: float = RECORD_BYTES,
) -> Servers:
    """Return the servers for a rate and an amount of memory, using the share `use` of each node."""
    by_rate = math.ceil(messages_per_second / (node_rate(events, record_bytes) * use))
    by_memory = math.ceil(memory_bytes / (node_memory_bytes * use))
    nodes = max(by_rate, by_memory, 1)
    return Servers(nodes, shards_for(nodes), "rate" if by_rate >= by_memory else "memory")


def shards_for(nodes: int) -> int:
    """Return over how many shards to spread a queue that fills this many servers.

    Enough for each to have several: 6, 12, 24, 48 …, which `shard_placement` spreads evenly.
    """
    if nodes == 1:
        return 1
    return int(3 * 2 ** math.ceil(math.log2(nodes * PARTS_PER_NODE / 3)))
