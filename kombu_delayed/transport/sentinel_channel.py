"""`delayed+sentinel://`: uses the master that Sentinels name, and after a failover the new one."""

from __future__ import annotations

from typing import Any

from kombu.transport import redis as stock
from redis import sentinel
from redis.backoff import NoBackoff
from redis.retry import Retry

from ..connection import urls
from ..connection.connection import ServerConnection
from ..connection.sentinel.connection import (
    MasterConnection,
    MasterPool,
    MasterTLSConnection,
    MasterWake,
    SentinelConnection,
)
from ..connection.sentinel.sentinels import Sentinels
from ..connection.sentinel.watch import watch_of
from ..connection.wakeup import WakeConnection
from ..store.store import Store
from .channel.channel import Channel
from .channel.connecting import QUIET

#: A Sentinel that does not answer within this time is skipped.
SENTINEL_SECONDS = 1.0


class SentinelStore(Store):
    """The store on whichever server is the master."""

    def hang_up(self) -> None:
        """Close its connections, also those to the Sentinels."""
        super().hang_up()
        self.client.connection_pool.sentinel_manager.hang_up()

    def _connect(self, client: Any) -> ServerConnection:
        pool = client.connection_pool
        return SentinelConnection(pool, pool.sentinel_manager.watch, self.format)


class SentinelChannel(Channel, stock.SentinelChannel):
    """A channel whose connections all go to the present master."""

    store_class = SentinelStore
    wake_class = MasterWake
    connection_class = MasterConnection
    connection_class_ssl = MasterTLSConnection
    master_name: str = ""
    min_other_sentinels: int = 0
    sentinel_kwargs: dict[str, Any] | None = None

    # A master that has vanished closes no connection, so timeouts have to be short.
    socket_timeout = 5.0
    socket_connect_timeout = 2.0
    health_check_interval = 5

    _sentinel_manager: Any = None  # older Kombu has none

    def _server(self) -> tuple[Any, ...]:
        # The address in the pool, which has been used already; a failover changes it.
        address = self.pool.master_address
        return self.master_name, address, self.pool.connection_kwargs["db"]

    def hears_over(self, connection: Any) -> bool:
        """Whether the other end of a connection is the master."""
        return not connection.has_left

    def master_changed(self) -> None:
        """Leave the old master, even while waiting for its answer. Safe from any thread."""
        if self.consumer is not None:
            self.consumer.hurry()
        if self.connection is not None:
            self.connection.cycle.wake_up()

    def _sentinel_managed_pool(self, asynchronous: bool = False) -> sentinel.SentinelConnectionPool:
        parameters = self._connparams(asynchronous)
        if self._sentinel_manager is None:
            self._sentinel_manager = self._new_sentinels()
        return MasterPool(self.master_name, self._sentinel_manager, **parameters)

    def _keepers_pool(self) -> Any:
        seconds = min(SENTINEL_SECONDS, self.options.lease_seconds / 12)
        manager = self._new_sentinels(socket_timeout=seconds, socket_connect_timeout=seconds)
        pool = MasterPool(self.master_name, manager, **{**self._connparams(), **QUIET})
        self._be_impatient(pool.connection_kwargs)
        return pool

    def _new_sentinels(self, **timeouts: float) -> Sentinels:
        where = urls.address(self.connection.client)
        parameters: dict[str, Any] = {
            "socket_timeout": SENTINEL_SECONDS,
            "socket_connect_timeout": SENTINEL_SECONDS,
            "retry": Retry(NoBackoff(), 0),  # the next Sentinel is the retry
            **QUIET,
        }
        if where.scheme == "sentinels":
            parameters |= {"ssl": True, **(where.ssl or {})}
        parameters |= self.sentinel_kwargs or {}
        found = Sentinels(
            where.sentinels,
            min_other_sentinels=self.min_other_sentinels,
            sentinel_kwargs=parameters | timeouts,
        )
        found.watch = watch_of(self.master_name, where.sentinels, parameters)
        found.watch.follow(self)
        return found

    def _disconnect_pools(self) -> None:
        # Older Kombu leaves the connections to the Sentinels open.
        manager, self._sentinel_manager = self._sentinel_manager, None
        super()._disconnect_pools()
        if manager is not None:
            manager.watch.leave(self)
            manager.hang_up()

    def _tcp_parameters(self, where: urls.Address) -> dict[str, Any]:
        parameters = super()._tcp_parameters(where)
        return {name: parameters[name] for name in parameters if name not in ("host", "port")}

    def _new_wake(self) -> WakeConnection:
        wake = super()._new_wake()
        wake.watch = self.pool.sentinel_manager.watch  # type: ignore[attr-defined]
        wake.grace_seconds = self.socket_timeout or wake.grace_seconds
        return wake
