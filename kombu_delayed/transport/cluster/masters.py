"""Checks the masters of a Cluster, and remembers what was found out."""

from __future__ import annotations

import redis

from ...connection.cluster.connection import Nodes
from ...connection.cluster.nodes import Node
from ...connection.native import get_logger
from ...connection.options import Options
from ...errors import UNREACHABLE, ReplicaError, ServerError
from .. import server_checks

logger = get_logger(__name__)

#: The first version with sharded pub/sub, whose channels have slots.
SHARDED_SINCE = 7


class ClusterMasters:
    """Checks each master once, for all channels of one connection."""

    def __init__(self) -> None:
        #: Node -> its partition size and the first part of its version.
        self._known: dict[Node, tuple[int, int]] = {}

    @property
    def have_sharded_pubsub(self) -> bool:
        """Whether no master is known to lack sharded pub/sub."""
        return all(version >= SHARDED_SINCE for _, version in self._known.values())

    def partition_size(self, nodes: Nodes, options: Options, format_key: str) -> int:
        """The smallest partition size of all masters; those that do not answer are skipped."""
        sizes: list[int] = []
        failed: Exception | None = None
        for node in nodes.cluster.masters():
            try:
                if node not in self._known:
                    self._known[node] = _look_at(node, nodes, options, format_key)
            except ReplicaError as error:  # the slots have got another master since we asked
                nodes.cluster.look()
                failed = error
                continue
            except UNREACHABLE as error:
                if isinstance(error, ServerError):
                    raise
                logger.warning("Node %s of the Cluster does not answer: %s", node, error)
                failed = error  # type: ignore[assignment]
                continue
            sizes.append(self._known[node][0])
        if not sizes and failed is not None:
            raise failed
        return min(sizes)


def _look_at(node: Node, nodes: Nodes, options: Options, format_key: str) -> tuple[int, int]:
    pool = nodes.pool(node)
    try:
        pool.release(nodes.cluster.reach(node, pool.get_connection))
        # A node without the key's slot answers with a redirection, which is not a version.
        client = redis.Redis(connection_pool=pool)
        found = server_checks.looked_at(client, "cluster", options, format_key)
    finally:
        pool.disconnect()
    return found.partition_size, int(found.version.split(".")[0] or 0)
