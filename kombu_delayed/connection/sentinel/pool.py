"""Connections to the present master, and after a failover to its successor."""

from __future__ import annotations

from typing import Any

from kombu.transport import redis as stock
from redis import sentinel


class _Rediscovers:
    """Whoever reconnects asks for the master; redis-py's goes back to where it was."""

    _sock: Any
    host: str
    port: int
    connection_pool: Any

    @property
    def has_left(self) -> bool:
        """Whether it is open, and to a server that is the master no more."""
        master = self.connection_pool.sentinel_manager.watch.address
        return self._sock is not None and master not in (None, (self.host, self.port))

    def connect(self, *args: Any, **kwargs: Any) -> None:
        """Connect to the master, and be told from now on when there is another one."""
        if self._sock is None:
            watch = self.connection_pool.sentinel_manager.watch
            watch.start()
            watch.wait()  # it may have come in the middle of a failover
        super().connect(*args, **kwargs)  # type: ignore[misc]

    def move(self) -> None:
        """Reconnect where this has left the master."""
        if self.has_left:
            self.disconnect()  # type: ignore[attr-defined]
        self.connect()

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        if self._sock is None:
            self.connect()
        super().send_packed_command(command, check_health)  # type: ignore[misc]


class MasterConnection(_Rediscovers, sentinel.SentinelManagedConnection):
    """A connection to whichever server is the master when it is made."""


class MasterTLSConnection(_Rediscovers, stock.SentinelManagedSSLConnection):
    """The same with TLS."""


class MasterPool(sentinel.SentinelConnectionPool):
    """Gives out connections to the present master."""

    def get_connection(self, *args: Any, **kwargs: Any) -> Any:
        """One that is connected."""
        connection: Any = super().get_connection(*args, **kwargs)
        try:
            connection.move()
        except BaseException:
            self.release(connection)
            raise
        return connection
