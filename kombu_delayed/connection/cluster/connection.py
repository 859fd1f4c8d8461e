"""Commands to the nodes of a Cluster, each to the one that has its keys."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from redis import ConnectionPool
from redis.crc import key_slot
from redis.exceptions import AskError, MovedError, ResponseError, TryAgainError

from kombu_delayed.errors import UNREACHABLE, ServerFull, ServerNotReady

from ..commands import Replicas, given_back, ignore, pack, pack_both, read, read_both
from ..connection import ServerConnection
from ..format import LOOK_SECONDS as FORMAT_SECONDS
from ..format import Format
from .nodes import Cluster, Node, named_by

#: So often a command is sent on before the Cluster counts as in disorder.
REDIRECTS = 16

#: So long a sender waits for a slot that is on its way to another node.
MOVING_SECONDS = 10.0

_SCRIPTS = frozenset({"EVAL", "EVALSHA"})
_KEYLESS = frozenset({"SCAN", "INFO", "TIME", "WAIT", "PING", "CONFIG", "CLIENT"})


class SlotMoves(ServerNotReady):
    """A slot is on its way to another node: what is in it can be used when it is there."""


def slot_of(command: Sequence[Any]) -> int:
    """The slot of a command's keys, which are all in one. Raises ValueError where it has none."""
    is_script = command[0] in _SCRIPTS
    if len(command) < 2 or command[0] in _KEYLESS or (is_script and not command[2]):
        raise ValueError(f"{command[0]} names no key, so no node of a Cluster")
    key = command[3] if is_script else command[1]
    return key_slot(key if isinstance(key, bytes) else str(key).encode(errors="surrogateescape"))


class NodeConnection(ServerConnection):
    """One connection to one node."""

    def __init__(
        self,
        cluster: Cluster,
        node: Node,
        pool: ConnectionPool,
        on_disconnect: Callable[[], None] = lambda: None,
        *,
        may_rest: bool = True,
    ) -> None:
        self.node = node
        self._cluster = cluster
        self._may_rest = may_rest
        self._on_disconnect = on_disconnect
        super().__init__(pool)

    def _reach(self, connect: Callable[[], Any]) -> Any:
        return self._cluster.reach(self.node, connect, may_rest=self._may_rest)

    def connect(self) -> Any:
        """Another connection, for who gives it back to the pool. Raises NodeDown."""
        return self._reach(super().connect)

    def ask(self, *command: Any, replicas: Replicas | None = None) -> Any:
        """Send a command for a slot that is on its way to this node."""
        connection = self.connect()
        with given_back(connection, self.pool):
            connection.send_packed_command([pack(("ASKING",)), pack_both(command, replicas)])
            read(connection)
            return read_both(connection, replicas)

    def _open(self, replicas: Replicas | None = None) -> None:
        if self._connection is not None and self._connection._sock is None:
            if self._unread:  # somebody has emptied the pool
                self._fail_posted()
            self._reach(self._connection.connect)
        super()._open(replicas)

    def _drop_closed(self) -> None:
        super()._drop_closed()
        if self._connection._sock is None:
            self._reach(self._connection.connect)

    def _refused(self, error: Exception) -> None:
        if isinstance(error, MovedError):
            self._cluster.redirected(error, self.node)

    def _disconnect(self) -> None:
        super()._disconnect()
        self._on_disconnect()


class ClusterConnection(ServerConnection):
    """A connection for each node, made when it is first needed."""

    #: Whether a node that was out of reach is left alone for a while: others need the caller, too.
    may_rest = True

    def __init__(
        self,
        cluster: Cluster,
        new_pool: Callable[[Node], ConnectionPool],
        format: Format | None = None,
    ) -> None:
        self.cluster = cluster
        self.format = format
        self._new_pool = new_pool
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._connections: dict[Node, NodeConnection] = {}
        self._format_at = -math.inf

    def look_again(self) -> None:
        """Ask for the version of the format with the next call."""
        self._format_at = -math.inf

    def look_at_format(self) -> None:
        """Ask for the version of the format. A node that is down keeps nobody from the others."""
        self._format_at = monotonic() + FORMAT_SECONDS
        try:
            if self.format is not None:
                self.format.look(self._route, self.everywhere)
        except UNREACHABLE:
            return
        except BaseException:
            self.look_again()
            raise

    @property
    def generation(self) -> int:  # type: ignore[override]
        """Changes with each connection, and when a slot has got another node."""
        connections = list(self._connections.values())
        return self.cluster.generation + sum(connection.generation for connection in connections)

    def over(self, node: Node) -> NodeConnection:
        """The connection of one node."""
        if self._pid != os.getpid():
            self.cluster.forget()  # a thread of the parent may have been at work on it
            self._start()
        found = self._connections.get(node)
        return found or self._connections.setdefault(
            node,
            NodeConnection(
                self.cluster,
                node,
                self._new_pool(node),
                self.look_again,
                may_rest=self.may_rest,
            ),
        )

    def to(self, command: Sequence[Any]) -> NodeConnection:
        """The connection of the node that has the keys of a command; to publish, any will do."""
        if command[0] == "PUBLISH":
            return self.over(self.cluster.any_master())
        return self.over(self.cluster.node(slot_of(command)))

    def everywhere(self) -> Sequence[NodeConnection]:
        """Those of all masters."""
        return [self.over(node) for node in self.cluster.masters()]

    def __call__(self, *command: Any, replicas: Replicas | None = None) -> Any:
        """Send one command to wherever its keys are, as a connection to one server.

        Raises NodeDown, too, and ServerNotReady for a slot that is on its way to another node.
        """
        if monotonic() >= self._format_at:
            self.look_at_format()
        return self._route(*command, replicas=replicas)

    def _route(self, *command: Any, replicas: Replicas | None = None) -> Any:
        slot = slot_of(command)
        connection, asks = self.over(self.cluster.node(slot)), False
        for _ in range(REDIRECTS):
            try:
                return (connection.ask if asks else connection)(*command, replicas=replicas)
            except AskError as error:
                asks = not isinstance(error, MovedError)  # which is an AskError too
                if not asks:
                    self.cluster.redirected(error, connection.node)
                connection = self.over(named_by(error, connection.node))
            except TryAgainError as error:
                raise SlotMoves(
                    f"slot {slot} is on its way to another node of the Cluster"
                ) from error
            except UNREACHABLE as error:
                self.cluster.look()
                refused = isinstance(error, ServerNotReady)  # and so it did nothing
                if not refused or (node := self.cluster.node(slot)) == connection.node:
                    raise
                connection, asks = self.over(node), False
        raise ServerNotReady(f"the nodes of the Cluster do not agree on which node has slot {slot}")

    def many(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """As that of any, with one write for each node; where one is down, its error."""
        answers: list[Any] = [None] * len(commands)
        for connection, places in self._by_connection(commands, answers).items():
            try:
                found = connection.many([commands[n] for n in places])
            except UNREACHABLE as error:
                self.cluster.look()
                found = [error] * len(places)
            for n, answer in zip(places, found, strict=True):
                answers[n] = answer
                if isinstance(answer, (AskError, TryAgainError)):  # and MovedError, an AskError
                    answers[n] = self._one(commands[n])
        return answers

    def _by_connection(
        self, commands: Sequence[Sequence[Any]], answers: list[Any]
    ) -> dict[NodeConnection, list[int]]:
        found: dict[NodeConnection, list[int]] = {}
        for n, command in enumerate(commands):
            try:
                found.setdefault(self.to(command), []).append(n)
            except UNREACHABLE as error:
                answers[n] = error
        return found

    def _one(self, command: Sequence[Any]) -> Any:
        try:
            return self(*command)
        except UNREACHABLE as error:
            return error
        except (ResponseError, ServerFull) as error:
            return error

    def insist(self, *command: Any, replicas: Replicas | None = None) -> Any:
        """As a call; for a slot that is on its way to another node it waits."""
        deadline, seconds = monotonic() + MOVING_SECONDS, 0.001
        while True:
            try:
                return self(*command, replicas=replicas)
            except SlotMoves:
                if monotonic() + seconds > deadline:
                    raise
            time.sleep(seconds)
            seconds = min(seconds * 2, 0.1)

    def post(
        self,
        *command: Any,
        on_error: Callable[[], None],
        on_answer: Callable[[Any], None] = ignore,
    ) -> None:
        """Send one command and do not wait for its answer, as `ServerConnection` does."""
        self.to(command).post(*command, on_error=on_error, on_answer=on_answer)

    def hold_back(self) -> None:
        """As `ServerConnection` does, of each node."""
        for connection in list(self._connections.values()):
            connection.hold_back()

    def push(self) -> None:
        """Send what was held back; what a broken connection had is failed."""
        for connection in list(self._connections.values()):
            with suppress(*UNREACHABLE):
                connection.push()

    def lend(self) -> None:
        """Nothing: redis-py's client has a pool of its own."""

    @property
    def look_at(self) -> float:  # type: ignore[override]
        """When to `look`, by the monotonic clock."""
        return min(
            (connection.look_at for connection in list(self._connections.values())),
            default=math.inf,
        )

    def look(self) -> None:
        """Read what has come of answers to what was posted, as `ServerConnection` does."""
        for connection in list(self._connections.values()):
            connection.look()

    def settle(self) -> None:
        """Read the answers of all that was posted; what a broken connection had is failed."""
        for connection in list(self._connections.values()):
            with suppress(*UNREACHABLE):
                connection.settle()


class Nodes:
    """The connections of one channel: a pool for each node, all with the same parameters."""

    def __init__(self, cluster: Cluster, parameters: Mapping[str, Any]) -> None:
        self.cluster = cluster
        self.parameters = dict(parameters)
        self._pools: list[ConnectionPool] = []

    def pool(self, node: Node) -> ConnectionPool:
        """A new pool of connections to one node."""
        pool = ConnectionPool(**{**self.parameters, "host": node.host, "port": node.port})
        self._pools.append(pool)
        return pool

    def disconnect(self) -> None:
        """Close all connections; what needs one opens it again."""
        for pool in self._pools:
            pool.disconnect()
