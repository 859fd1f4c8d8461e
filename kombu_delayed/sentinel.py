"""`delayed+sentinel://`: the master that Sentinels name, and after a failover its successor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kombu.transport import redis as stock
from redis import sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError
from redis.retry import Retry

from . import urls
from .channel import Channel
from .errors import UNREACHABLE, OptionError
from .wake import WakeConnection

#: A Sentinel that has not answered for so long is passed over.
SENTINEL_SECONDS = 1.0

_NO_ANSWER: tuple[type[BaseException], ...] = (*UNREACHABLE, ResponseError)


class Sentinels(sentinel.Sentinel):
    """Asks one Sentinel after the other for the master; who knew it last is asked first."""

    has_found = False

    def discover_master(self, service_name: str) -> tuple[str, int]:
        """The master's host and port.

        Raises MasterNotFoundError, a connection error, while there is none, and OptionError where
        there never was one of this name.
        """
        silent: list[str] = []
        known: set[str] = set()
        for node in self.sentinels:
            try:
                masters: Any = node.sentinel_masters()
            except _NO_ANSWER as error:
                silent.append(f"{_name(node)}: {error}")
                continue
            known.update(masters)
            state = masters.get(service_name)
            if state and self.check_master_state(state, service_name):
                self.sentinels = [node, *(other for other in self.sentinels if other is not node)]
                self.has_found = True
                return state["ip"], state["port"]
        is_unknown = service_name not in known and 2 * len(silent) < len(self.sentinels)
        if is_unknown and not self.has_found:
            raise OptionError(_unknown(service_name, known))
        raise sentinel.MasterNotFoundError(
            "; ".join([f"no Sentinel names a master {service_name!r} that is up", *silent])
        )


def _unknown(service_name: str, known: Iterable[str]) -> str:
    names = ", ".join(repr(name) for name in sorted(known)) or "none at all"
    if not service_name:
        return f"delayed+sentinel:// takes the transport option master_name; there is {names}"
    return (
        f"the Sentinels know no master {service_name!r}, which the transport option master_name "
        f"names; there is {names}"
    )


def _name(node: Any) -> str:
    parameters = node.connection_pool.connection_kwargs
    return f"{parameters['host']}:{parameters['port']}"


class _Rediscovers:
    """Whoever reconnects asks for the master; redis-py's goes back to where it was."""

    _sock: Any

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        if self._sock is None:
            self.connect()  # type: ignore[attr-defined]
        super().send_packed_command(command, check_health)  # type: ignore[misc]


class MasterConnection(_Rediscovers, sentinel.SentinelManagedConnection):
    """A connection to whichever server is the master when it is made."""


class MasterTLSConnection(_Rediscovers, stock.SentinelManagedSSLConnection):
    """The same with TLS."""


class SentinelChannel(Channel, stock.SentinelChannel):
    """A channel whose connections all go to the present master."""

    connection_class = MasterConnection
    connection_class_ssl = MasterTLSConnection
    master_name: str = ""
    min_other_sentinels: int = 0
    sentinel_kwargs: dict[str, Any] | None = None

    # A master that has vanished closes no connection, so silence has to be short.
    socket_timeout = 5.0
    socket_connect_timeout = 2.0
    health_check_interval = 5

    _sentinel_manager: Any = None  # older Kombu has none

    @property
    def patience_seconds(self) -> float:
        """How long a lost connection is mended here: the other URLs lead to the same master."""
        return self.options.reconnect_seconds

    def _server(self) -> tuple[Any, ...]:
        # Of the pool that has been used already: after a failover it is another one.
        address = self.pool.master_address
        return self.master_name, address, self.pool.connection_kwargs["db"]

    def _sentinel_managed_pool(self, asynchronous: bool = False) -> sentinel.SentinelConnectionPool:
        parameters = self._connparams(asynchronous)
        if self._sentinel_manager is None:
            self._sentinel_manager = self._new_sentinels()
        return sentinel.SentinelConnectionPool(
            self.master_name, self._sentinel_manager, **parameters
        )

    def _new_sentinels(self) -> Sentinels:
        where = urls.address(self.connection.client)
        parameters: dict[str, Any] = {
            "socket_timeout": SENTINEL_SECONDS,
            "socket_connect_timeout": SENTINEL_SECONDS,
            "retry": Retry(NoBackoff(), 0),  # the next one is the retry
        }
        if where.scheme == "sentinels":
            parameters |= {"ssl": True, **(where.ssl or {})}
        return Sentinels(
            where.sentinels,
            min_other_sentinels=self.min_other_sentinels,
            sentinel_kwargs={**parameters, **(self.sentinel_kwargs or {})},
        )

    def _disconnect_pools(self) -> None:
        # Older Kombu leaves the connections to the Sentinels open.
        manager, self._sentinel_manager = self._sentinel_manager, None
        super()._disconnect_pools()
        if manager is not None:
            for node in manager.sentinels:
                node.connection_pool.disconnect()

    def _tcp_parameters(self, where: urls.Address) -> dict[str, Any]:
        parameters = super()._tcp_parameters(where)
        return {name: parameters[name] for name in parameters if name not in ("host", "port")}

    def _new_wake(self) -> WakeConnection:
        wake = super()._new_wake()
        wake.grace_seconds = self.socket_timeout or wake.grace_seconds
        return wake
