"""Sends each command to the node of a Cluster that has its keys."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any

from redis import ConnectionPool
from redis.crc import key_slot
from redis.exceptions import AskError, MovedError, TryAgainError

from kombu_delayed.errors import UNREACHABLE, ServerNotReady

from ..commands import (
    AwaitsReplicas,
    Replicas,
    given_back,
    ignore,
    or_error,
    pack,
    pack_both,
    read,
    read_both,
)
from ..connection import ServerConnection
from ..format import LOOK_SECONDS as FORMAT_SECONDS
from ..format import Format
from .nodes import Cluster, Node, named_by

#: How many redirects a command follows before the Cluster counts as inconsistent.
REDIRECTS = 16

#: How long a sender waits for a slot that is moving to another node.
MOVING_SECONDS = 10.0

_SCRIPTS = frozenset({"EVAL", "EVALSHA"})
_KEYLESS = frozenset({"SCAN", "INFO", "TIME", "WAIT", "PING", "CONFIG", "CLIENT"})


class SlotMoves(ServerNotReady):
    """A slot is moving to another node. Its keys can be used once it has arrived."""


def slot_of(command: Sequence[Any]) -> int:
    """Return the slot that a command's keys share. Raises ValueError if it has no keys."""
    is_script = command[0] in _SCRIPTS
    if len(command) < 2 or command[0] in _KEYLESS or (is_script and not command[2]):
        raise ValueError(f"{command[0]} names no key, so no node of a Cluster")
    key = command[3] if is_script else command[1]
    return key_slot(key if isinstance(key, bytes) else str(key).encode(errors="surrogateescape"))


class NodeConnection(AwaitsReplicas, ServerConnection):
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
        """Take another connection, which the caller returns to the pool. Raises NodeDown."""
        return self._reach(super().connect)

    def ask(self, *command: Any, replicas: Replicas | None = None) -> Any:
        """Send a command for a slot that is moving to this node."""
        connection = self.connect()
        with given_back(connection, self.pool):
            connection.send_packed_command([pack(("ASKING",)), pack_both(command, replicas)])
            read(connection)
            return read_both(connection, replicas)

    def _open(self, replicas: Replicas | None = None) -> None:
        if self._connection is not None and self._connection._sock is None:
            if self._unread:  # the pool was emptied meanwhile
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

    #: Whether an unreachable node is left alone for a while, as the caller serves other nodes, too.
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
        """Ask for the version of the format. A node that is down does not block the others."""
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
        """A number that changes with each new connection and when a slot has moved."""
        connections = list(self._connections.values())
        return self.cluster.generation + sum(connection.generation for connection in connections)

    def over(self, node: Node) -> NodeConnection:
        """The connection of one node."""
        if self._pid != os.getpid():
            self.cluster.forget()  # a thread of the parent may have been changing it
            self._start()
        found = self._connections.get(node) or self._connections.setdefault(
            node,
            NodeConnection(
                self.cluster,
                node,
                self._new_pool(node),
                self.look_again,
                may_rest=self.may_rest,
            ),
        )
        found.is_consumers = self.is_consumers
        return found

    def to(self, command: Sequence[Any]) -> NodeConnection:
        """Return the connection to the node with a command's keys; for PUBLISH, to any master."""
        if command[0] == "PUBLISH":
            return self.over(self.cluster.any_master())
        return self.over(self.cluster.node(slot_of(command)))

    def everywhere(self) -> Sequence[NodeConnection]:
        """Return the connections to all masters."""
        return [self.over(node) for node in self.cluster.masters()]

    def __call__(self, *command: Any, replicas: Replicas | None = None) -> Any:
        """Send one command to the node that has its keys, otherwise like `ServerConnection`.

        Also raises NodeDown, and ServerNotReady for a slot that is moving to another node.
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
                asks = not isinstance(error, MovedError)  # a subclass of AskError
                if not asks:
                    self.cluster.redirected(error, connection.node)
                connection = self.over(named_by(error, connection.node))
            except TryAgainError as error:
                raise SlotMoves(
                    f"slot {slot} is on its way to another node of the Cluster"
                ) from error
            except UNREACHABLE as error:
                self.cluster.look()
                refused = isinstance(error, ServerNotReady)  # so it was not carried out
                if not refused or (node := self.cluster.node(slot)) == connection.node:
                    raise
                connection, asks = self.over(node), False
        raise ServerNotReady(f"the nodes of the Cluster do not agree on which node has slot {slot}")

    def many(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Like `ServerConnection.many`, with one write per node.

        Commands for a node that is down are answered with its error.
        """
        answers: list[Any] = [None] * len(commands)
        for connection, places in self._by_connection(commands, answers).items():
            try:
                found = connection.many([commands[n] for n in places])
            except UNREACHABLE as error:
                self.cluster.look()
                found = [error] * len(places)
            for n, answer in zip(places, found, strict=True):
                answers[n] = answer
                if isinstance(answer, (AskError, TryAgainError)):  # or its subclass MovedError
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
            return or_error(partial(self, *command))
        except UNREACHABLE as error:
            return error

    def insist(self, *command: Any, replicas: Replicas | None = None) -> Any:
        """Like a call, but wait `MOVING_SECONDS` at most for a slot that is moving."""
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
        """Send one command and do not wait for its answer, like `ServerConnection.post`."""
        self.to(command).post(*command, on_error=on_error, on_answer=on_answer)

    def hold_back(self) -> None:
        """Like `ServerConnection.hold_back`, for each node."""
        for connection in list(self._connections.values()):
            connection.hold_back()

    def push(self) -> None:
        """Send what was held back. Commands on a broken connection fail."""
        for connection in list(self._connections.values()):
            with suppress(*UNREACHABLE):
                connection.push()

    def lend(self) -> None:
        """Do nothing: redis-py's client has its own pool."""

    @property
    def look_at(self) -> float:  # type: ignore[override]
        """When to `look`, by the monotonic clock."""
        return min(
            (connection.look_at for connection in list(self._connections.values())),
            default=math.inf,
        )

    def look(self) -> None:
        """Read the answers to posted commands that have arrived, like `ServerConnection.look`."""
        for connection in list(self._connections.values()):
            connection.look()

    def settle(self) -> None:
        """Read the answers to all posted commands. Commands on a broken connection fail."""
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
        """Return a new pool of connections to one node."""
        pool = ConnectionPool(**{**self.parameters, "host": node.host, "port": node.port})
        self._pools.append(pool)
        return pool

    def disconnect(self) -> None:
        """Close all connections. Each reopens when it is needed."""
        for pool in self._pools:
            pool.disconnect()
