"""The moves of messages on a Cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis

from ..connection.cluster.connection import ClusterWire, slot_of
from ..connection.cluster.nodes import Cluster, Node
from ..connection.connection import Wire
from ..connection.format import Format
from ..connection.native import get_logger
from ..errors import UNREACHABLE, NodeDown
from .shard_placement import hash_tag, queue_with
from .shards import QueueShards, Shards
from .store import Store

logger = get_logger(__name__)


class Nodes:
    """The connections of one channel: a pool for each node, all with the same parameters."""

    def __init__(self, cluster: Cluster, parameters: Mapping[str, Any]) -> None:
        self.cluster = cluster
        self.parameters = dict(parameters)
        self._pools: list[redis.ConnectionPool] = []

    def pool(self, node: Node) -> redis.ConnectionPool:
        """A new pool of connections to one node."""
        pool = redis.ConnectionPool(**{**self.parameters, "host": node.host, "port": node.port})
        self._pools.append(pool)
        return pool

    def disconnect(self) -> None:
        """Close all connections; what needs one opens it again."""
        for pool in self._pools:
            pool.disconnect()

    def new_wire(self, format: Format | None = None) -> ClusterWire:
        """A wire over pools of its own."""
        return ClusterWire(self.cluster, self.pool, format)


class ClusterStore(Store):
    """The moves of the messages of a Cluster. Each queue is in one slot, and so on one node."""

    tagged = True
    renewals_at_once = 1
    look_limit = 1
    errors_of_one_queue = UNREACHABLE
    run: ClusterWire

    @property
    def cluster(self) -> Cluster:
        """Which node has what."""
        return self.run.cluster

    def node_of(self, queue: str) -> Node:
        """The node that has a queue. Raises NodeDown where none has."""
        return self.cluster.node(slot_of(("", self.keys(queue).wake)))

    def heard(self, answer: Any) -> Any:
        if isinstance(answer, UNREACHABLE):
            logger.info("Cannot renew the lease on a queue now: %s", answer)
            return None
        return super().heard(answer)

    def _hash_tag(self, queue: str) -> str:
        return hash_tag(queue)

    def queue_with(self, tag: str) -> str:
        """The queue whose keys have this in braces."""
        return queue_with(tag)

    def hang_up(self) -> None:
        """Close its connections; what needs one opens it again."""
        self.client.disconnect()

    def _wire(self, client: Any) -> Wire:
        wire: Wire = client.new_wire(self.format)
        return wire

    def _new_shards(self, prefix: str, configured: int | Mapping[str, int]) -> Shards:
        return QueueShards(self.run, prefix, configured, self._is_down)

    def _is_down(self, queue: str) -> bool:
        try:
            return self.cluster.is_down(self.node_of(queue))
        except NodeDown:
            return True
