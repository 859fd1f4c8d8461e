"""Connections to the current master, never to one that is being or has been replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kombu.transport import redis as stock
from redis import ConnectionPool, sentinel

from ..commands import AwaitsReplicas, Replicas, ignore
from ..connection import ServerConnection
from ..format import Format
from ..wakeup import WakeConnection
from .watch import MasterChanges, MasterWatch


class _Rediscovers:
    """A mixin that asks for the master to reconnect; redis-py's goes back to the old address."""

    _sock: Any
    host: str
    port: int
    connection_pool: Any

    @property
    def has_left(self) -> bool:
        """Whether it is open, but to a server that is no longer the master."""
        master = self.connection_pool.sentinel_manager.watch.address
        return self._sock is not None and master not in (None, (self.host, self.port))

    def connect(self, *args: Any, **kwargs: Any) -> None:
        """Connect to the master, and watch from now on for another one."""
        if self._sock is None:
            watch = self.connection_pool.sentinel_manager.watch
            watch.start()
            watch.wait()  # a failover may be under way
        super().connect(*args, **kwargs)  # type: ignore[misc]

    def move(self) -> None:
        """Connect to the current master, unless it is connected to it already."""
        if self.has_left:
            self.disconnect()  # type: ignore[attr-defined]
        self.connect()

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        if self._sock is None:
            self.connect()
        super().send_packed_command(command, check_health)  # type: ignore[misc]


class MasterConnection(_Rediscovers, sentinel.SentinelManagedConnection):
    """A connection to the server that is the master when it is opened."""


class MasterTLSConnection(_Rediscovers, stock.SentinelManagedSSLConnection):
    """The same with TLS."""


class MasterPool(sentinel.SentinelConnectionPool):
    """Gives out connections to the current master."""

    def get_connection(self, *args: Any, **kwargs: Any) -> Any:
        """Return a connection that is open."""
        connection: Any = super().get_connection(*args, **kwargs)
        try:
            connection.move()
        except BaseException:
            self.release(connection)
            raise
        return connection


class SentinelConnection(AwaitsReplicas, ServerConnection):
    """A `ServerConnection` that waits with its commands while a failover is under way."""

    def __init__(
        self, pool: ConnectionPool, watch: MasterWatch, format: Format | None = None
    ) -> None:
        self._watch = watch
        super().__init__(pool, format)

    def __call__(self, *command: Any, replicas: Replicas | None = None) -> Any:
        """Like `ServerConnection`, but to the next master if the current one is being replaced."""
        self._watch.wait()
        return super().__call__(*command, replicas=replicas)

    def many(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Like `ServerConnection`, but to the next master if the current one is being replaced."""
        self._watch.wait()
        return super().many(commands)

    def post(
        self,
        *command: Any,
        on_error: Callable[[], None],
        on_answer: Callable[[Any], None] = ignore,
    ) -> None:
        """Like `ServerConnection`. Raises MasterChanges while the master is being replaced."""
        if self._watch.is_held:
            raise MasterChanges("the Sentinels are about to name another master")
        super().post(*command, on_error=on_error, on_answer=on_answer)

    def _open(self, replicas: Replicas | None = None) -> None:
        if self._connection is not None and self._connection.has_left:
            self._fail_posted()
        super()._open(replicas)

    def connect(self) -> Any:
        """Take another connection, to the next master if the current one is being replaced."""
        self._watch.wait()
        return super().connect()

    def refresh(self, connection: Any, is_idle: bool) -> None:
        """Move it to the current master. Raises MasterChanges if that would lose answers."""
        self._watch.wait()
        if connection.has_left and not is_idle:
            raise MasterChanges("the Sentinels name another master")
        connection.move()


class MasterWake(WakeConnection):
    """Waits for tokens of the current master, never of a former one."""

    watch: MasterWatch

    def check(self, now: float) -> bool:
        """Like any. Raises MasterChanges if it has left the master or a failover is under way."""
        if self.watch.is_held:
            raise MasterChanges("the Sentinels are about to name another master")
        if self.connection is not None and self.connection.has_left:
            raise MasterChanges("the Sentinels name another master")
        return super().check(now)
