"""A Redis Cluster: which node has which slot, and which nodes answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, NamedTuple, TypeVar

from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.exceptions import AskError, RedisClusterException, RedisError
from redis.retry import Retry

from kombu_delayed.errors import UNREACHABLE, NodeDown, ServerNotReady

from .. import native

logger = native.get_logger(__name__)

T = TypeVar("T")

#: How long a node that cannot be reached is left alone: twice as long each time …
FIRST_REST_SECONDS, LONGEST_REST_SECONDS = 0.05, 10.0

#: … and at least this many times as long as the attempt took, or a silent node would take up all
#: the time.
REST_FACTOR = 5

#: While a node is down, the others are asked for the slots at most once in this time.
LOOK_SECONDS = 0.25

#: How long a node may take to name the slots before another one is asked.
ASK_SECONDS = 1.0

#: How many times redis-py asks again, another node each time.
ASK_TRIES = 3

#: Errors of redis-py if it cannot get the slots; IndexError: there are none.
_NO_ANSWER = (RedisError, RedisClusterException, OSError, IndexError)


class Node(NamedTuple):
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


#: The place of a queue whose slot no node has. It cannot be connected to.
NOWHERE = Node("", 0)


@dataclass
class _Rest:
    """Until when an unreachable node is left alone, and why."""

    until: float
    seconds: float
    error: str


class _Map(NamedTuple):
    """A copy of what redis-py knows of the nodes, which can be read without redis-py's locks."""

    #: Slot -> the master that has it.
    owners: dict[int, Node]
    masters: frozenset[Node]
    nodes: frozenset[Node]


class Cluster:
    """The nodes and slots of a Cluster, from redis-py and kept up to date. Safe from any thread.

    `parameters` are those of connections, without host and port.
    """

    def __init__(self, nodes: Sequence[tuple[str, int]], parameters: dict[str, Any]) -> None:
        self._given = [Node(*each) for each in nodes]
        self._parameters = parameters
        #: Changes whenever a slot may have another node.
        self.generation = 0
        self.forget()

    def forget(self) -> None:
        """Forget what is known so far."""
        # The keepers of leases take it, too. It is never held for long once there is a client.
        self._lock = native.lock()
        self._is_looking = False
        self._client: RedisCluster | None = None
        self._map: _Map | None = None
        self._moved: dict[int, Node] = {}
        self._resting: dict[Node, _Rest] = {}
        self._looked_at = -LOOK_SECONDS

    def node(self, slot: int) -> Node:
        """Return the master that has a slot. Raises NodeDown if none has."""
        found = self._moved.get(slot) or self._known().owners.get(slot)
        if found is None:
            self.look()
            raise NodeDown(f"no node of the Cluster has slot {slot}")
        return found

    def masters(self) -> list[Node]:
        """Return all masters that have slots, even those that do not answer."""
        return sorted(self._known().masters | {*self._moved.values()})

    def has(self, node: Node) -> bool:
        """Return whether a node has slots or replicates those of another node."""
        return node in self._known().nodes or node in self._moved.values()

    def is_down(self, node: Node) -> bool:
        """Return whether a node is left alone now. If so, ask which node has its slots."""
        rest = self._resting.get(node)
        if rest is None or monotonic() >= rest.until:
            return False
        self.look()
        return True

    def any_master(self) -> Node:
        """Return a random master, if possible one that was not found to be down."""
        masters = self.masters()
        return random.choice([node for node in masters if node not in self._resting] or masters)

    def reach_any(self, connect: Callable[[Node], T]) -> T:
        """Open a connection to one of the masters. Raises NodeDown if none answers."""
        masters = self.masters()
        random.shuffle(masters)
        for node in masters[:-1]:
            with suppress(*UNREACHABLE):
                return self.reach(node, partial(connect, node))
        return self.reach(masters[-1], partial(connect, masters[-1]))

    def redirected(self, error: AskError, by: Node) -> None:
        """Record that a node has redirected a command to the node that has the slot now."""
        with self._lock:
            self._moved[error.slot_id] = named_by(error, by)
            self.generation += 1
        self.look()

    def reach(self, node: Node, connect: Callable[[], T], *, may_rest: bool = True) -> T:
        """Open a connection to a node.

        Raises NodeDown if it cannot be reached and, with `may_rest`, while it is left alone.
        """
        self._check(node, may_rest)
        began = monotonic()
        try:
            found = connect()
        except UNREACHABLE as error:
            if self._failed(node, error, monotonic() - began):
                self._looked_at = -LOOK_SECONDS  # earlier answers are outdated
            self.look()
            raise NodeDown(f"node {node} of the Cluster cannot be reached: {error}") from error
        if node in self._resting:
            with self._lock:
                self._resting.pop(node, None)
        return found

    def _check(self, node: Node, may_rest: bool) -> None:
        if node == NOWHERE:
            self.look()
            raise NodeDown("no node of the Cluster has its slot")
        rest = self._resting.get(node) if may_rest else None
        if rest is None or monotonic() >= rest.until:
            return
        self.look()
        raise NodeDown(f"node {node} of the Cluster cannot be reached: {rest.error}")

    def _failed(self, node: Node, error: BaseException, took_seconds: float) -> bool:
        """Leave a node alone for a while. Returns whether it was not known to be down before."""
        with self._lock:
            before = self._resting.get(node)
            seconds = (
                min(before.seconds * 2, LONGEST_REST_SECONDS) if before else FIRST_REST_SECONDS
            )
            until = monotonic() + min(
                max(seconds, took_seconds * REST_FACTOR), LONGEST_REST_SECONDS
            )
            self._resting[node] = _Rest(until, seconds, str(error))
            return before is None

    def look(self) -> None:
        """Ask a node for the slots, unless that was just done. If none answers, nothing changes."""
        with self._lock:
            client, now = self._client, monotonic()
            if client is None or self._is_looking or now - self._looked_at < LOOK_SECONDS:
                return
            self._is_looking, self._looked_at = True, now
            moved, before = dict(self._moved), self._map
        try:
            with suppress(*_NO_ANSWER):
                self._ask(client.nodes_manager)
                self._map = _map(client.nodes_manager)
                with self._lock:
                    self._moved = dict(self._moved.items() - moved.items())
                    self.generation += before is None or self._map.owners != before.owners
        finally:
            _hang_up(client.nodes_manager)
            self._is_looking = False

    def _ask(self, manager: Any) -> None:
        """Ask the nodes that are not known to be down; if none answers, the nodes of the URL."""
        known = manager.startup_nodes
        up = {n: each for n, each in known.items() if _where(each) not in self._resting}
        try:
            manager.startup_nodes = up or known
            manager.initialize()
        except _NO_ANSWER:
            manager.startup_nodes = {each.name: each for each in _startup(self._given)}
            try:
                manager.initialize()
            except BaseException:
                manager.startup_nodes = known
                raise

    def _known(self) -> _Map:
        if (found := self._map) is None:
            with self._lock:
                if (found := self._map) is None:
                    client = self._find()
                    _hang_up(client.nodes_manager)
                    found = self._map = _map(client.nodes_manager)
                    self._client = client
        return found

    def _find(self) -> RedisCluster:
        parameters = {
            **self._parameters,
            "socket_timeout": ASK_SECONDS,
            "socket_connect_timeout": ASK_SECONDS,
            # redis-py asks one master for its commands. If that one is down, it asks another.
            "retry": Retry(NoBackoff(), ASK_TRIES),
            "require_full_coverage": False,
        }
        try:
            return RedisCluster(startup_nodes=_startup(self._given), **parameters)
        except RedisClusterException as error:
            raise ServerNotReady(str(error)) from error
        except IndexError:
            raise ServerNotReady("no node of the Cluster has any slots yet") from None


def named_by(error: AskError, by: Node) -> Node:
    """Return the node that an error names. Without a host, it is on the host of node `by`."""
    return Node(error.host or by.host, error.port)


def _map(manager: Any) -> _Map:
    where = {name: _where(node) for name, node in manager.nodes_cache.items()}
    return _Map(
        {slot: where[nodes[0].name] for slot, nodes in manager.slots_cache.items() if nodes},
        frozenset(map(_where, manager.get_nodes_by_server_type("primary"))),
        frozenset(where.values()),
    )


def _hang_up(manager: Any) -> None:
    """Disconnect: another thread may ask next, and a gevent socket belongs to one thread."""
    for node in [*manager.nodes_cache.values(), *manager.startup_nodes.values()]:
        if node.redis_connection is not None:
            node.redis_connection.connection_pool.disconnect()


def _where(node: ClusterNode) -> Node:
    return Node(node.host, node.port)


def _startup(nodes: Iterable[Node]) -> list[ClusterNode]:
    return [ClusterNode(node.host, node.port) for node in nodes]
