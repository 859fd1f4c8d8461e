"""How a channel reaches its server: connection parameters, pools, clients, the store over them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import redis
from kombu.transport import redis as stock
from redis.exceptions import ResponseError

from ...connection import urls
from ...connection.commands import Replicas, doubts
from ...connection.format import Format
from ...connection.native import has_eventlet
from ...connection.options import Options
from ...connection.watched import TlsConnection, closed_by_others, watched
from ...consumer.policy import decisions
from ...consumer.policy.decisions import Rules
from ...embedded import server as embedded
from ...errors import CompressionError, OptionError, ServerNotReady, UrlError, translate
from ...message import zstd
from ...store.keys import format_version, literal
from ...store.store import Limits, Store
from .. import server_checks

#: Parameters of connections that redis-py opens without logging, as it does with RESP3: threads
#: beside greenlets may take no lock of `logging`.
QUIET = {"protocol": 2}

#: The attribute of Kombu's connection with the absolute directory of its embedded server: the
#: program may change its working directory.
DIRECTORY = "delayed_directory"

#: Sending waits for replicas at most for this fraction of `socket_timeout`.
REPLICA_SHARE = 0.9


class ConnectingChannel(stock.Channel):
    """A channel of Kombu's Redis transport with our options and connections."""

    store_class = Store
    connection_class_ssl = TlsConnection

    #: Commands that wait longer than this for an answer count as a lost connection.
    socket_timeout = 30.0

    # Older Kombu has neither of these.
    client_name: str | None = None
    _expires: dict[str, int] = {}  # noqa: RUF012

    _rules: Rules | None = None
    _sync_client: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._pid = os.getpid()
        with self._errors_translated(), self._silence_is_named():
            super().__init__(*args, **kwargs)

    @cached_property
    def options(self) -> Options:
        """The `delayed_*` transport options."""
        return Options.parse(self.connection.client.transport_options)

    @property
    def rules(self) -> Rules | None:
        """The rules for messages that are sent and delivered here; None if there are none."""
        if self._rules is not None or decisions.factory is None:
            return self._rules
        if (found := decisions.rules_of(self.options.policies)) is not None:
            for queue in self.options.policies or {}:
                check_one_shard(queue, self.options.shards_of(queue), found)
            self._rules = found
        return self._rules

    @property
    def patience_seconds(self) -> float:
        """How long to retry a lost connection before Kombu is told, and tries another URL."""
        client = self.connection.client
        has_others = len(client.alt) > 1 and urls.scheme_of(client) not in urls.LISTS
        return 0 if has_others else self.options.reconnect_seconds

    # The store.

    @cached_property
    def store(self) -> Store:
        """The moves of messages, over this channel's connection pool."""
        client, options = self._client_for_store(), self.options
        return self.store_class(
            client,
            prefix=self.global_keyprefix,
            priority_steps=self.priority_steps,
            separator=self.sep,
            partition_size=options.partition_size or self._partition_size(client),
            limits=Limits(options.max_deliveries, options.dead_limit, options.dead_seconds),
            event_limit=options.events,
            shards=options.shards,
            replicas=self._replicas(),
            format=Format(
                format_version(self.global_keyprefix), literal(self.global_keyprefix) + "{*}:*"
            ),
            compression=self._compression(),
        )

    def _client_for_store(self) -> Any:
        return self._client_of(self.pool)

    def _compression(self) -> str:
        if self.options.compression and not zstd.is_installed():
            raise CompressionError
        return self.options.compression or ""

    def _replicas(self) -> Replicas | None:
        count, seconds = self.options.replicas_to_wait, self.options.replica_timeout_seconds
        if self.socket_timeout:  # the sender would take a late answer for a lost connection
            seconds = min(seconds, self.socket_timeout * REPLICA_SHARE)
        return Replicas(count, max(int(seconds * 1000), 1)) if count else None

    def _client_of(self, pool: Any) -> redis.Redis:
        # A provider of streamed credentials only tells the pools of clients that name it.
        provider = pool.connection_kwargs.get("credential_provider")
        return redis.Redis(connection_pool=pool, credential_provider=provider)

    def _server(self) -> tuple[Any, ...]:
        parameters = self.pool.connection_kwargs
        names = ("host", "port", "path", "db", "username")
        # Not the one in the pool: each pool makes one of an import path.
        provider = urls.address(self.connection.client).credential_provider
        return *map(parameters.get, names), provider

    def _partition_size(self, client: redis.Redis) -> int:
        key = format_version(self.global_keyprefix)
        return server_checks.partition_size(self._server(), client, self.options, key)

    # Connections that give up long before a lease has ended.

    def _lease_store(self) -> Store:
        """The store for a lease, whose thread shares its connections with nobody."""
        found = self.store.over(self._client_of(self._keepers_pool()))
        found.for_others = self.store
        return found

    def _keepers_pool(self) -> Any:
        """Connections that a thread of the operating system opens, uses and closes."""
        pool = redis.ConnectionPool(**{**self._connparams(), **QUIET})
        self._be_impatient(pool.connection_kwargs)
        return pool

    def _impatient_pool(self) -> Any:
        pool = self._get_pool()
        self._be_impatient(pool.connection_kwargs)
        return pool

    def _be_impatient(self, parameters: dict[str, Any]) -> None:
        limit = self.options.lease_seconds / 4
        for name in ("socket_timeout", "socket_connect_timeout"):
            if name in parameters:  # a Unix socket has no limit for connecting
                parameters[name] = min(parameters[name] or limit, limit)

    # The interface of Kombu.

    def _create_client(self, asynchronous: bool = False) -> Any:
        if asynchronous:
            return super()._create_client(asynchronous=True)
        if self._sync_client is None or self._sync_client.connection_pool is not self.pool:
            self._sync_client = super()._create_client()
        return self._sync_client

    @cached_property
    def client(self) -> Any:
        """The client that Kombu looks at the server with; it has no connection of its own."""
        return self._create_client()

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        where = urls.address(self.connection.client)
        parameters: dict[str, Any] = {
            "db": self._database(where),
            "username": where.username,
            "password": where.password,
            # One more for the moment in which a signal handler or a batch needs its own.
            "max_connections": self.max_connections + 1 if self.max_connections else None,
            "socket_timeout": self.socket_timeout,
            "health_check_interval": self.health_check_interval,
            "retry_on_timeout": self.retry_on_timeout,
            "client_name": self.client_name,
        }
        if where.credential_provider:
            self._process_credential_provider(where.credential_provider, parameters)
        connection_class: Any
        if where.scheme == "embedded":
            known = vars(self.connection.client)
            directory = known.get(DIRECTORY, where.path)
            parameters["path"] = str(embedded.ensure(directory))
            directory = str(Path(directory).expanduser().resolve())
            known[DIRECTORY] = parameters["directory"] = directory
            connection_class = embedded.EmbeddedConnection
        elif where.scheme == "socket":
            parameters["path"] = where.path
            connection_class = redis.UnixDomainSocketConnection
        else:
            parameters.update(self._tcp_parameters(where))
            connection_class = (
                self.connection_class if where.ssl is None else self.connection_class_ssl
            )
        if has_eventlet():
            connection_class = closed_by_others(connection_class)
        if asynchronous:
            connection_class = self._watched(connection_class)
        return {**parameters, "connection_class": connection_class}

    def _database(self, where: urls.Address) -> int:
        try:
            number = int(self._prepare_virtual_host(where.virtual_host))
        except ValueError:
            number = -1
        if number < 0:
            raise UrlError(
                f"the database in the broker URL must be 0 or more, not {where.virtual_host!r}"
            )
        return number

    def _tcp_parameters(self, where: urls.Address) -> dict[str, Any]:
        return {
            "host": where.host or "127.0.0.1",
            "port": where.port or self.connection.default_port,
            "socket_connect_timeout": self.socket_connect_timeout,
            "socket_keepalive": self.socket_keepalive,
            "socket_keepalive_options": self.socket_keepalive_options,
            **(where.ssl or {}),
        }

    def _watched(self, connection_class: type) -> type:
        return watched(connection_class, self._before_closing)

    def _before_closing(self, connection: Any) -> None:
        if self._registered:
            self._on_connection_disconnect(connection)

    @contextmanager
    def conn_or_acquire(self, client: Any = None) -> Iterator[Any]:
        """A client for Kombu's own commands, whose errors are translated as ours are."""
        if (store := self.__dict__.get("store")) is not None:
            store.run.lend()
        doubts.drop_idle(self.pool)
        with self._errors_translated(), super().conn_or_acquire(client) as client:
            yield client

    @contextmanager
    def _errors_translated(self) -> Iterator[None]:
        """Translate errors; have servers checked again if one is not ready."""
        try:
            yield
        except (ResponseError, ServerNotReady) as error:
            meaning: Exception = error
            if isinstance(error, ResponseError):
                meaning = translate(error, self._database(urls.address(self.connection.client)))
            if isinstance(meaning, ServerNotReady):
                server_checks.look_again()
            if meaning is error:
                raise
            raise meaning from error

    @contextmanager
    def _silence_is_named(self) -> Iterator[None]:
        """While connecting: a server that takes the connection and then says nothing."""
        try:
            yield
        except redis.TimeoutError as error:
            where = urls.address(self.connection.client)
            if "reading" not in str(error) or where.scheme in urls.LISTS:
                raise
            raise redis.TimeoutError(where.silence) from error

    def _after_fork(self) -> None:
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        self._sync_client = None
        for name in ("store", "client", "subclient"):
            self.__dict__.pop(name, None)
        super()._after_fork()


def check_one_shard(queue: str, count: int, rules: Rules) -> None:
    """Raise OptionError for a queue with several shards and policies that need a single one."""
    gate = rules.gate(queue) if count > 1 else None
    if gate is not None and gate.is_whole:
        raise OptionError(
            f"queue {queue!r} has policies for order or limits, and {count} shards: such a queue "
            "can only have one shard, unless these are Fair, and limits with scope='global'"
        )
