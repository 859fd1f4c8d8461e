"""Connections to the current master, and after a failover to its successor."""

from __future__ import annotations

from typing import Any

from kombu.transport import redis as stock
from redis import sentinel


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
