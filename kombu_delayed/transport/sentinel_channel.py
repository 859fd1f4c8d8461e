"""`delayed+sentinel://`: the master that Sentinels name, and after a failover its successor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from kombu.transport import redis as stock
from redis import sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError
from redis.retry import Retry

from ..connection import urls
from ..connection.connection import Wire
from ..connection.sentinel.connection import MasterWire
from ..connection.sentinel.watch import MasterChanges, MasterWatch, present, watch_of
from ..connection.wakeup import WakeConnection
from ..errors import UNREACHABLE, OptionError
from ..store.store import Store
from .channel import Channel

#: A Sentinel that has not answered for so long is passed over.
SENTINEL_SECONDS = 1.0

_NO_ANSWER: tuple[type[BaseException], ...] = (*UNREACHABLE, ResponseError)


class Sentinels(sentinel.Sentinel):
    """Asks one Sentinel after the other for the master; who knew it last is asked first."""

    has_found = False
    watch: MasterWatch
    #: Whether its connections have the process listen to the Sentinels.
    listens = True

    def discover_master(self, service_name: str) -> tuple[str, int]:
        """The master's host and port.

        Raises MasterNotFoundError, a connection error, while there is none, and OptionError where
        there never was one of this name.
        """
        silent: list[str] = []
        behind: list[tuple[int, tuple[str, int]]] = []
        known: set[str] = set()
        for node in sorted(self.sentinels, key=lambda each: _where(each) != self.watch.told_by):
            try:
                masters: Any = _asked(node, node.sentinel_masters)
                known.update(masters)
                state = masters.get(service_name)
                if not state or not self.check_master_state(state, service_name):
                    continue
                address = _asked(node, partial(present, node, service_name, state))
            except _NO_ANSWER as error:
                silent.append(f"{_name(node)}: {error}")
                continue
            self.has_found = True
            if not self.watch.found(address, epoch := int(state.get("config-epoch", 0))):
                behind.append((epoch, address))
                continue
            self.sentinels = [node, *(other for other in self.sentinels if other is not node)]
            return address
        if behind:
            epoch, address = max(behind)
            self.watch.found_no_newer(address, epoch)
            return address
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


def _asked(node: Any, ask: Callable[[], Any]) -> Any:
    """Keep no connection: whoever asks next may be another thread, under gevent or eventlet."""
    try:
        return ask()
    finally:
        node.connection_pool.disconnect(inuse_connections=False)


def _hang_up(manager: Sentinels) -> None:
    for node in manager.sentinels:
        node.connection_pool.disconnect()


def _where(node: Any) -> tuple[str, int]:
    parameters = node.connection_pool.connection_kwargs
    return parameters["host"], parameters["port"]


def _name(node: Any) -> str:
    return "{}:{}".format(*_where(node))


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
        manager = self.connection_pool.sentinel_manager
        if self._sock is None and manager.listens:
            manager.watch.start()
            manager.watch.wait()  # it may have come in the middle of a failover
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


class MasterWake(WakeConnection):
    """Waits for tokens of the master, and of no server that has been one."""

    watch: MasterWatch

    def check(self, now: float) -> bool:
        """As any. Raises MasterChanges where it has left the master, or a failover is under way."""
        if self.watch.is_held:
            raise MasterChanges("the Sentinels are about to name another master")
        if self.connection is not None and self.connection.has_left:
            raise MasterChanges("the Sentinels name another master")
        return super().check(now)


class SentinelStore(Store):
    """The moves of the messages of whichever server is the master."""

    def hang_up(self) -> None:
        """Close its connections, also those to the Sentinels."""
        super().hang_up()
        _hang_up(self.client.connection_pool.sentinel_manager)

    def _wire(self, client: Any) -> Wire:
        pool = client.connection_pool
        return MasterWire(pool, pool.sentinel_manager.watch, self.format)


class SentinelChannel(Channel, stock.SentinelChannel):
    """A channel whose connections all go to the present master."""

    store_class = SentinelStore
    wake_class = MasterWake
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

    def hears_over(self, connection: Any) -> bool:
        """Whether its other end is the master."""
        return not connection.has_left

    def master_changed(self) -> None:
        """Leave the old master, whatever this channel waits for there; from any thread."""
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
        # Under gevent and eventlet what the keeper's thread starts would stand still with it.
        manager = self._new_sentinels()
        manager.listens = False
        return self._impatient(MasterPool(self.master_name, manager, **self._connparams()))

    def _new_sentinels(self) -> Sentinels:
        where = urls.address(self.connection.client)
        parameters: dict[str, Any] = {
            "socket_timeout": SENTINEL_SECONDS,
            "socket_connect_timeout": SENTINEL_SECONDS,
            "retry": Retry(NoBackoff(), 0),  # the next one is the retry
        }
        if where.scheme == "sentinels":
            parameters |= {"ssl": True, **(where.ssl or {})}
        parameters |= self.sentinel_kwargs or {}
        found = Sentinels(
            where.sentinels,
            min_other_sentinels=self.min_other_sentinels,
            sentinel_kwargs=parameters,
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
            _hang_up(manager)

    def _tcp_parameters(self, where: urls.Address) -> dict[str, Any]:
        parameters = super()._tcp_parameters(where)
        return {name: parameters[name] for name in parameters if name not in ("host", "port")}

    def _new_wake(self) -> WakeConnection:
        wake = super()._new_wake()
        wake.watch = self.pool.sentinel_manager.watch  # type: ignore[attr-defined]
        wake.grace_seconds = self.socket_timeout or wake.grace_seconds
        return wake
