"""The Kombu side of one channel on a Cluster: its consumer, its queues and their bindings."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import redis

from ...connection.cluster.nodes import Node
from ...connection.cluster.wakeup import NodeWake
from ...connection.native import get_logger
from ...consumer.cluster_consumer import ClusterConsumer
from ...consumer.consumer import Consumer
from ...consumer.lease.cluster_lease import ClusterLease
from ...errors import UNREACHABLE, OptionError, ServerFull
from ...store.calls.shard_placement import queue_with
from ...store.calls.shards import queue_of
from ..channel.channel import Channel
from .bindings import ClusterBindings
from .connecting import ClusterConnectingChannel

logger = get_logger(__name__)


class ClusterChannel(ClusterConnectingChannel, Channel):
    """A channel whose scripts and bindings go to the node that has them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.bindings = ClusterBindings(self)
        super().__init__(*args, **kwargs)

    # Consuming.

    def _new_consumer(self) -> Consumer:
        lease = ClusterLease(
            self._lease_store(),
            self.options.lease_seconds,
            self._server(),
            self.options.consumer_name,
            self.store.node_of,
            self._lease_store,
        )
        return ClusterConsumer(self._new_session(lease), self._new_node_wake)

    def _new_node_wake(self, node: Node) -> NodeWake:
        parameters = {
            **self.nodes.parameters,
            "host": node.host,
            "port": node.port,
            "connection_class": self._watched(self.nodes.parameters["connection_class"]),
            "protocol": 2,  # RESP3 has another form for pushed messages
        }
        pool = redis.ConnectionPool(**parameters)
        wake = NodeWake(
            pool.make_connection(),
            lambda connection: self.cluster.reach(node, connection.connect),
            lambda error: self.cluster.redirected(error, node),
            lambda queue: self.store.keys(queue).wake,
            self.health_check_interval or 25,
            lambda: self.consumer.lease.consumer if self.consumer else "",
            sharded=self.connection.cluster_masters.have_sharded_pubsub,
        )
        wake.grace_seconds = self.socket_timeout or wake.grace_seconds
        return wake

    # Kombu's own keys, each in the slot of its exchange or queue.

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str, queue: str) -> None:
        if self.typeof(exchange).type == "fanout":
            self._fanout_queues[queue] = exchange, routing_key.replace("#", "*")
        member = self.bindings.member(routing_key, pattern, queue)
        self.bindings.declare(exchange, member, queue)

    def keep_up(self) -> None:
        """As any channel, and bind what could not be bound when it was declared."""
        super().keep_up()
        self.bindings.retry()

    def _refresh_bindings(self, queues: list[str]) -> None:
        for queue in queues:
            for exchange, routing_key, arguments in self.state.queue_bindings(queue):
                _, pattern, _ = self.typeof(exchange).prepare_bind(
                    queue, exchange, routing_key, arguments
                )
                member = self.bindings.member(routing_key, pattern, queue)
                with suppress(ServerFull):  # it lasts for two more refreshes
                    self.bindings.write(exchange, member, queue)

    def sweep_bindings(self, limit: int = 100) -> int:
        """Does nothing: on a Cluster, tables that nobody refreshes expire on the server."""
        return 0

    def get_table(self, exchange: str) -> list[tuple[str, ...]]:
        """The bindings of an exchange, each as (routing key, pattern, queue)."""
        return self.bindings.table(exchange)

    def _drop_queue(
        self, queue: str, exchange: str, routing_key: str, pattern: str, *args: Any, **kwargs: Any
    ) -> None:
        self.bindings.drop(exchange, self.bindings.member(routing_key, pattern, queue))

    def _new_queue(self, queue: str, *args: Any, **kwargs: Any) -> None:
        if not queue:
            raise OptionError("a queue on a Cluster needs a name")
        if queue_with(queue) != queue:
            raise OptionError(
                f"a queue on a Cluster cannot be named {queue!r}: a shard of queue "
                f"{queue_of(queue_with(queue))!r} has keys of that name"
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
        """Delete the queue of a reply; if its node is down, there was none."""
        with suppress(*UNREACHABLE):
            super().after_reply_message_received(queue)

    _declaring = False

    def queue_declare(self, *args: Any, **kwargs: Any) -> Any:
        """Declare a queue, even if its node is down: other queues need not wait for it."""
        self._declaring = not kwargs.get("passive")
        try:
            return super().queue_declare(*args, **kwargs)
        finally:
            self._declaring = False

    def _maybe_update_queues_expire(self, client: Any, queue: str) -> None:
        if queue in self._expires:
            for key in self.store.keys(queue).ready:
                self.store.run("PEXPIRE", key, self._expires[queue])
