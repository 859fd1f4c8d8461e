"""The servers for a steady load, and what they need beside its messages."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from ..errors import OptionError
from . import (
    EVENT_BYTES,
    allocated,
    compressed_bytes,
    message_bytes,
    node_rate,
    record_bytes,
    servers_for,
    shards_for,
)

#: Resident memory beyond what the allocator has given out.
FRAGMENTATION = 0.1

#: From this size on jemalloc gives each record its own pages, and one more.
LARGE_BYTES = 16_384
PAGE_BYTES = 4_096

#: How fast a rewrite of the append-only file or a snapshot reads the memory.
REWRITE_BYTES_PER_SECOND = 100e6

#: Memory that is copied for each message that passes during a rewrite or a snapshot.
COPIED_BYTES = 40 * 1024

#: The most that a server buffers for a replica that is behind (client-output-buffer-limit).
REPLICA_BYTES = 256 * 2**20

MOST_NODES = 100_000


@dataclass(frozen=True, kw_only=True)
class Load:
    """A steady load, and its servers. Sizes are in bytes, `delay_seconds` is the mean.

    `use` is the share of each node to plan with, `replicas` are those of each node.
    `is_compressed`: with the option `delayed_compression`.
    """

    rate_per_second: float
    delay_seconds: float
    payload_bytes: float
    events: int
    node_memory_bytes: float
    use: float
    replicas: int
    is_compressed: bool = False

    @property
    def messages(self) -> float:
        """How many are delayed at any time, by Little's law."""
        return self.rate_per_second * self.delay_seconds

    @property
    def record_bytes(self) -> float:
        """The size of a message's record in Redis."""
        return record_bytes(self.payload_bytes)

    @property
    def message_bytes(self) -> float:
        """The memory of a message in Redis, with all that belongs to it."""
        compressed = compressed_bytes(self.payload_bytes) if self.is_compressed else None
        return message_bytes(self.record_bytes, compressed_bytes=compressed)

    @property
    def node_rate(self) -> float:
        """The messages per second that keep one node fully busy."""
        return node_rate(self.events > 0, self.record_bytes)


@dataclass(frozen=True)
class Node:
    """The memory of one node."""

    data_bytes: float
    fragmentation_bytes: float
    rewrite_bytes: float
    replica_bytes: float

    @property
    def total_bytes(self) -> float:
        """All of it, at the worst moment."""
        return self.data_bytes + self.fragmentation_bytes + self.rewrite_bytes + self.replica_bytes


@dataclass(frozen=True)
class Plan:
    """The plan for a load. `servers` are nodes and their replicas, `because_of` is rate or memory.

    `memory_bytes` is that of all messages and events, without replicas. `capacity_per_second` is
    the most that all nodes can do, and `headroom` is that divided by the load's rate.
    """

    messages: float
    message_bytes: float
    memory_bytes: float
    nodes: int
    shards: int
    servers: int
    because_of: str
    node: Node
    node_rate_per_second: float
    capacity_per_second: float
    headroom: float


def plan(load: Load) -> Plan:
    """Plan the fewest nodes for a load. Raises OptionError if no sensible number will do."""
    nodes, because_of = fewest_nodes(load)
    node = node_of(load, nodes)
    return Plan(
        messages=load.messages,
        message_bytes=load.message_bytes,
        memory_bytes=node.data_bytes * nodes,
        nodes=nodes,
        shards=shards_for(nodes),
        servers=nodes * (1 + load.replicas),
        because_of=because_of,
        node=node,
        node_rate_per_second=load.node_rate,
        capacity_per_second=load.node_rate * nodes,
        headroom=load.node_rate * nodes / load.rate_per_second,
    )


def fewest_nodes(load: Load) -> tuple[int, str]:
    """Return how many nodes a load needs, and why: rate or memory. Raises like `plan`."""
    if load.replicas * REPLICA_BYTES > load.node_memory_bytes / 2:
        raise OptionError(
            f"the buffers of {load.replicas} replicas, {REPLICA_BYTES // 2**20} MiB each, take "
            f"more than half of a node of {load.node_memory_bytes / 2**20:,.0f} MiB: give a larger "
            "--node-memory or fewer --replicas"
        )
    found = servers_for(
        load.rate_per_second,
        load.messages * load.message_bytes,
        load.node_memory_bytes,
        load.events > 0,
        load.use,
        load.record_bytes,
    )
    if found.nodes > MOST_NODES:
        raise OptionError(
            f"it takes more than {MOST_NODES:,} nodes for {load.messages:,.0f} messages: look at "
            "--rate, --delay, --payload and --node-memory"
        )

    def fits(nodes: int) -> bool:
        return node_of(load, nodes).total_bytes <= load.node_memory_bytes

    most = 8 * found.nodes
    nodes = bisect_left(range(most), True, lo=found.nodes, key=fits)
    if nodes == most and not fits(nodes):
        raise OptionError(
            f"{load.events:,} events for each shard fit on no number of nodes of "
            f"{load.node_memory_bytes / 2**30:,.1f} GiB: give fewer --events or a larger "
            "--node-memory"
        )
    return nodes, found.because_of if nodes == found.nodes else "memory"


def node_of(load: Load, nodes: int) -> Node:
    """Return the memory of each of `nodes` nodes."""
    messages = load.messages / nodes
    events = load.events * shards_for(nodes) / nodes
    data = messages * load.message_bytes + events * EVENT_BYTES
    kept = compressed_bytes(load.payload_bytes) if load.is_compressed else load.record_bytes
    is_large = allocated(round(kept)) >= LARGE_BYTES
    rewritten = load.rate_per_second / nodes * data / REWRITE_BYTES_PER_SECOND
    return Node(
        data,
        data * FRAGMENTATION + messages * PAGE_BYTES * is_large,
        min(rewritten * COPIED_BYTES, data),
        load.replicas * REPLICA_BYTES,
    )
