"""How a channel reaches the nodes of a Cluster, and checks of their masters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis

from ...connection import urls
from ...connection.cluster.connection import Nodes
from ...connection.cluster.nodes import Cluster, Node
from ...connection.native import get_logger
from ...connection.options import Options
from ...errors import UNREACHABLE, ReplicaError, ServerError
from ...store.keys import format_version
from .. import server_checks
from ..channel.connecting import QUIET, ConnectingChannel

logger = get_logger(__name__)

#: The first version with sharded pub/sub, whose channels have slots.
SHARDED_SINCE = 7


class ClusterConnectingChannel(ConnectingChannel):
    """Connections to each node for commands, and to any one of them for pub/sub."""

    # A node that has vanished closes no connection, so timeouts have to be short.
    socket_timeout = 5.0
    socket_connect_timeout = 2.0
    health_check_interval = 5

    _nodes: Nodes | None = None

    @property
    def cluster(self) -> Cluster:
        """The state of the Cluster, shared by all channels of this connection."""
        transport = self.connection
        if transport.cluster is None:
            where = urls.address(transport.client)
            transport.cluster = Cluster(where.nodes, _for_client(self._node_parameters()))
        found: Cluster = transport.cluster
        return found

    def _node_parameters(self) -> dict[str, Any]:
        parameters = super()._connparams()
        return {name: parameters[name] for name in parameters if name not in ("host", "port")}

    @property
    def nodes(self) -> Nodes:
        """The connections for commands."""
        if self._nodes is None:
            self._nodes = self._new_nodes()
        return self._nodes

    def _new_nodes(self) -> Nodes:
        return Nodes(self.cluster, self._node_parameters())

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        """The parameters for any node: for pub/sub, and to find out whether one answers."""
        parameters = super()._connparams(asynchronous)
        return {**parameters, "connection_class": _to_any(parameters["connection_class"], self)}

    def _client_for_store(self) -> Any:
        return self.nodes

    def _server(self) -> tuple[Any, ...]:
        return tuple(urls.address(self.connection.client).nodes)

    def _partition_size(self, client: Any) -> int:
        key = format_version(self.global_keyprefix)
        size: int = self.connection.cluster_masters.partition_size(client, self.options, key)
        return size

    def _disconnect_pools(self) -> None:
        super()._disconnect_pools()
        if self._nodes is not None:
            self._nodes.disconnect()

    def _after_fork(self) -> None:
        self._nodes = None
        self.connection.cluster = None
        super()._after_fork()

    def hears_over(self, connection: Any) -> bool:
        """Whether the node at the other end of a connection is still in the Cluster."""
        return self.cluster.has(Node(connection.host, connection.port))

    def _impatient_pool(self) -> Nodes:
        nodes = self._new_nodes()
        self._be_impatient(nodes.parameters)
        return nodes

    def _keepers_pool(self) -> Nodes:
        nodes = self._impatient_pool()
        nodes.parameters |= QUIET
        return nodes

    def _client_of(self, pool: Any) -> Any:
        return pool if isinstance(pool, Nodes) else super()._client_of(pool)


def _for_client(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a connection in the form that redis-py's client takes."""
    unknown = ("db", "connection_class", "max_connections", "retry_on_timeout")
    uses_tls = issubclass(parameters["connection_class"], redis.SSLConnection)
    return {
        **{name: value for name, value in parameters.items() if name not in unknown},
        **({"ssl": True} if uses_tls else {}),
        **QUIET,
    }


def _to_any(connection_class: type, channel: ClusterConnectingChannel) -> type:
    """A class of connections to any master that answers, chosen when a connection is opened."""

    class AnyNodeConnection(connection_class):
        _is_connected = False

        def connect(self, *args: Any, **kwargs: Any) -> None:
            if self._sock is None:
                self._is_connected = False
                channel.cluster.reach_any(self._connect_to)
            super().connect(*args, **kwargs)

        def send_packed_command(self, *args: Any, **kwargs: Any) -> None:
            if self._is_connected and not channel.hears_over(self):
                self.disconnect()  # messages there reach nobody else
            if self._sock is None:  # redis-py would go back to the same node
                self.connect()
            super().send_packed_command(*args, **kwargs)

        def _connect_to(self, node: Node) -> None:
            self.host, self.port = node
            super().connect()
            self._is_connected = True

    return AnyNodeConnection


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
