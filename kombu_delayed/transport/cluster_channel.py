"""`delayed+rediscluster://`: a channel whose queues are spread over the nodes of a Cluster."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from time import monotonic
from typing import Any

import redis
from kombu.utils.encoding import bytes_to_str

from ..connection import urls
from ..connection.cluster.nodes import Cluster, Node
from ..connection.cluster.wakeup import NodeWake
from ..connection.native import get_logger
from ..consumer.cluster_consumer import ClusterConsumer
from ..consumer.consumer import Consumer
from ..consumer.lease.cluster_lease import ClusterLease
from ..errors import UNREACHABLE, NodeDown, OptionError, ReplicaError, ServerError
from ..store.cluster_store import ClusterStore, Nodes
from ..store.keys import bindings, format_version, lasting_bindings
from ..store.shard_placement import queue_with
from ..store.shards import queue_of
from .channel import Channel
from .server_checks import check, inspect

logger = get_logger(__name__)

#: The first version with pub/sub channels that have a slot.
SHARDED_SINCE = 7

#: A binding that could not be written is tried again after so long.
BIND_SECONDS = 1.0


class ClusterChannel(Channel):
    """A channel whose scripts and bindings go to the node that has them."""

    store_class = ClusterStore

    # A node that has vanished closes no connection, so silence has to be short.
    socket_timeout = 5.0
    socket_connect_timeout = 2.0
    health_check_interval = 5

    _nodes: Nodes | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        #: Bindings that are not on their node yet, (exchange, member) -> queue.
        self._unbound: dict[tuple[str, str], str] = {}
        self._bind_at = 0.0
        #: The bindings of exchanges as they were read last.
        self._tables: dict[str, list[tuple[str, ...]]] = {}
        super().__init__(*args, **kwargs)

    @property
    def patience_seconds(self) -> float:
        """How long a lost connection is mended here: all URLs lead to the same nodes."""
        return self.options.reconnect_seconds

    # Connections.

    @property
    def cluster(self) -> Cluster:
        """What all channels of this connection know of the Cluster."""
        transport = self.connection
        if transport.cluster is None:
            where = urls.address(transport.client)
            transport.cluster = Cluster(where.nodes, _for_client(self._node_parameters(where)))
        found: Cluster = transport.cluster
        return found

    def _node_parameters(self, where: urls.Address) -> dict[str, Any]:
        parameters = super()._connparams()
        return {name: parameters[name] for name in parameters if name not in ("host", "port")}

    @property
    def nodes(self) -> Nodes:
        """The connections for commands."""
        if self._nodes is None:
            where = urls.address(self.connection.client)
            self._nodes = Nodes(self.cluster, self._node_parameters(where))
        return self._nodes

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        """Of connections to whichever node: for pub/sub, and to find out whether one answers."""
        parameters = super()._connparams(asynchronous)
        return {**parameters, "connection_class": _to_any(parameters["connection_class"], self)}

    def _client_for_store(self) -> Any:
        return self.nodes

    def _server(self) -> tuple[Any, ...]:
        return tuple(urls.address(self.connection.client).nodes)

    def _compact_size(self, client: Any) -> int:
        """The least of all masters; those that do not answer now are passed over."""
        sizes: list[int] = []
        failed: Exception | None = None
        for node in self.cluster.masters():
            try:
                found = self._look_at(node)
            except ReplicaError as error:  # the slots have got another master since we asked
                self.cluster.look()
                failed = error
                continue
            except UNREACHABLE as error:
                if isinstance(error, ServerError):
                    raise
                logger.warning("Node %s of the Cluster does not answer: %s", node, error)
                failed = error  # type: ignore[assignment]
                continue
            sizes.append(found)
        if not sizes and failed is not None:
            raise failed
        return min(sizes)

    def _look_at(self, node: Node) -> int:
        known, prefix = self.connection.known_nodes, self.global_keyprefix
        if node not in known:
            pool = self.nodes.pool(node)
            try:
                pool.release(self.cluster.reach(node, pool.get_connection))
                # A node that has another slot than the key says so, and that is no version.
                found = inspect(redis.Redis(connection_pool=pool), format_version(prefix))
            finally:
                pool.disconnect()
            check(
                found,
                mode="cluster",
                unsafe_server=self.options.unsafe_server,
                clock_skew_warning_seconds=self.options.clock_skew_warning_seconds,
            )
            known[node] = found.partition_size, int(found.version.split(".")[0] or 0)
        return int(known[node][0])

    def _disconnect_pools(self) -> None:
        super()._disconnect_pools()
        if self._nodes is not None:
            self._nodes.disconnect()

    def _after_fork(self) -> None:
        self._nodes = None
        self.connection.cluster = None
        super()._after_fork()

    def hears_over(self, connection: Any) -> bool:
        """Whether the node at its other end has not been taken out of the Cluster."""
        return self.cluster.has(Node(connection.host, connection.port))

    # Consuming.

    def _new_consumer(self) -> Consumer:
        store = self.store
        assert isinstance(store, ClusterStore)
        lease = ClusterLease(
            self._lease_store(),
            self.options.lease_seconds,
            self._server(),
            self.options.consumer_name,
            store.node_of,
            self._lease_store,
        )
        return ClusterConsumer(self._new_session(lease), self._new_node_wake)

    def _impatient_pool(self) -> Nodes:
        where = urls.address(self.connection.client)
        parameters = self._node_parameters(where)
        limit = self.options.lease_seconds / 4
        for name in ("socket_timeout", "socket_connect_timeout"):
            parameters[name] = min(parameters.get(name) or limit, limit)
        return Nodes(self.cluster, parameters)

    def _client_of(self, pool: Any) -> Any:
        return pool if isinstance(pool, Nodes) else super()._client_of(pool)

    def _new_node_wake(self, node: Node) -> NodeWake:
        versions = [version for _, version in self.connection.known_nodes.values()]
        parameters = {**self.nodes.parameters, "host": node.host, "port": node.port}
        # RESP3 has another form for what was not asked for.
        pool = redis.ConnectionPool(
            **{
                **parameters,
                "connection_class": self._watched(parameters["connection_class"]),
                "protocol": 2,
            }
        )
        wake = NodeWake(
            pool.make_connection(),
            lambda connection: self.cluster.reach(node, connection.connect),
            lambda error: self.cluster.redirected(error, node),
            lambda queue: self.store.keys(queue).wake,
            self.health_check_interval or 25,
            lambda: self.consumer.lease.consumer if self.consumer else "",
            sharded=min(versions, default=SHARDED_SINCE) >= SHARDED_SINCE,
        )
        wake.grace_seconds = self.socket_timeout or wake.grace_seconds
        return wake

    # Kombu's own keys, each in the slot of its exchange or queue.

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str, queue: str) -> None:
        if self.typeof(exchange).type == "fanout":
            self._fanout_queues[queue] = exchange, routing_key.replace("#", "*")
        member = self.sep.join([routing_key or "", pattern or "", queue or ""])
        self._unbound[exchange, member] = queue
        self._bind_missing()
        if (exchange, member) in self._unbound:
            # Who declares others goes on with them.
            logger.warning(
                "Queue %r is bound to exchange %r when its node is back", queue, exchange
            )

    def _bind_missing(self) -> None:
        """Bind what has been declared and is not on its node yet; what cannot be is kept."""
        self._bind_at = monotonic() + BIND_SECONDS
        for (exchange, member), queue in tuple(self._unbound.items()):
            self._unbound.pop((exchange, member), None)
            try:
                self._bind(exchange, member, queue)
            except UNREACHABLE as error:
                logger.info("Cannot bind queue %r to exchange %r now: %s", queue, exchange, error)
                self._unbound[exchange, member] = queue

    def follow_shards(self) -> None:
        """As any channel; and bind what could not be bound when it was declared."""
        super().follow_shards()
        if self._unbound and monotonic() >= self._bind_at:
            self._bind_missing()

    def _bind(self, exchange: str, member: str, queue: str) -> None:
        run, prefix = self.store.run, self.global_keyprefix
        table, lasting = bindings(exchange, prefix), lasting_bindings(exchange, prefix)
        expires = queue in self._expires and hasattr(self, "_binding_ttl")
        run.insist("SADD", table, member)
        if not expires:
            run.insist("SADD", lasting, member)
        if run("EXISTS", lasting):
            run("PERSIST", table)
        else:
            run("PEXPIRE", table, self._binding_ttl(queue))

    def _refresh_bindings(self, queues: list[str]) -> None:
        for queue in queues:
            for exchange, routing_key, arguments in self.state.queue_bindings(queue):
                prepared = self.typeof(exchange).prepare_bind(
                    queue, exchange, routing_key, arguments
                )
                member = self.sep.join([routing_key or "", prepared[1] or "", queue])
                self._bind(exchange, member, queue)

    def sweep_bindings(self, limit: int = 100) -> int:
        """Nothing: on a Cluster the server itself drops tables that nobody has refreshed."""
        return 0

    def get_table(self, exchange: str) -> list[tuple[str, ...]]:
        """The bindings of an exchange, each as (routing key, pattern, queue)."""
        if self._unbound:
            self._bind_missing()
        try:
            found = self.store.run.insist("SMEMBERS", bindings(exchange, self.global_keyprefix))
        except NodeDown:  # shards of its queues may be on other nodes
            declared = self.state.exchanges.get(exchange, {}).get("table")
            if known := self._tables.get(exchange) or declared:
                return [*known]
            raise
        table = [tuple(bytes_to_str(each).split(self.sep)) for each in found]
        self._tables[exchange] = table
        return table

    def _drop_queue(
        self, queue: str, exchange: str, routing_key: str, pattern: str, *args: Any, **kwargs: Any
    ) -> None:
        member = self.sep.join([routing_key or "", pattern or "", queue or ""])
        self._unbound.pop((exchange, member), None)
        for key in (bindings, lasting_bindings):
            self.store.run("SREM", key(exchange, self.global_keyprefix), member)

    def _new_queue(self, queue: str, *args: Any, **kwargs: Any) -> None:
        if not queue or queue.startswith("}"):
            raise OptionError(f"a queue on a Cluster cannot be named {queue!r}")
        if queue_with(queue) != queue:
            raise OptionError(
                f"a queue on a Cluster cannot be named {queue!r}: so are the keys of a shard of "
                f"queue {queue_of(queue_with(queue))!r}"
            )
        super()._new_queue(queue, *args, **kwargs)

    def _size(self, queue: str) -> int:
        try:
            return super()._size(queue)
        except UNREACHABLE as error:
            if not self._declaring:
                raise
            logger.warning("Cannot count queue %r now: %s", queue, error)
            return 0

    def after_reply_message_received(self, queue: str) -> None:
        """Delete the queue of a reply; where its node is down there was none."""
        with suppress(*UNREACHABLE):
            super().after_reply_message_received(queue)

    _declaring = False

    def queue_declare(self, *args: Any, **kwargs: Any) -> Any:
        """Declare a queue, also one whose node is down: other queues need not wait for it."""
        self._declaring = not kwargs.get("passive")
        try:
            return super().queue_declare(*args, **kwargs)
        finally:
            self._declaring = False

    def _maybe_update_queues_expire(self, client: Any, queue: str) -> None:
        if queue in self._expires:
            for key in self.store.keys(queue).ready:
                self.store.run("PEXPIRE", key, self._expires[queue])


def _for_client(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a connection as redis-py's client takes them."""
    unknown = ("db", "connection_class", "max_connections", "retry_on_timeout")
    uses_tls = issubclass(parameters["connection_class"], redis.SSLConnection)
    return {
        **{name: value for name, value in parameters.items() if name not in unknown},
        **({"ssl": True} if uses_tls else {}),
    }


def _to_any(connection_class: type, channel: ClusterChannel) -> type:
    """A class of connections to whichever master answers, chosen whenever one is opened."""

    class AnyNodeConnection(connection_class):
        _is_connected = False

        def connect(self, *args: Any, **kwargs: Any) -> None:
            if self._sock is None:
                self._is_connected = False
                channel.cluster.reach_any(self._connect_to)
            super().connect(*args, **kwargs)

        def send_packed_command(self, *args: Any, **kwargs: Any) -> None:
            if self._is_connected and not channel.hears_over(self):
                self.disconnect()  # what is said there nobody else hears
            if self._sock is None:  # redis-py goes back to where it was
                self.connect()
            super().send_packed_command(*args, **kwargs)

        def _connect_to(self, node: Node) -> None:
            self.host, self.port = node
            super().connect()
            self._is_connected = True

    return AnyNodeConnection
