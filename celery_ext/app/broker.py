"""The connection to an app's broker and its backlog."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from copy import copy
from functools import lru_cache
from typing import Any, TypeVar
from weakref import WeakSet

from celery import Celery
from kombu import Connection
from kombu.exceptions import OperationalError
from redis.exceptions import AuthenticationError, ConnectionError, ResponseError

from kombu_delayed.connection import forks, urls
from kombu_delayed.connection.cluster.connection import NodeConnection, SlotMoves
from kombu_delayed.connection.cluster.nodes import Node
from kombu_delayed.connection.commands import Replicas
from kombu_delayed.connection.connection import ServerConnection
from kombu_delayed.consumer.policy.decisions import Rules
from kombu_delayed.errors import UNREACHABLE
from kombu_delayed.store.store import Store
from kombu_delayed.transport.transport import Transport

from ..errors import BrokerError

#: Keys of the app's `task_publish_retry_policy`: connecting is retried as in `apply_async`.
RETRY_POLICY = ("max_retries", "interval_start", "interval_step", "interval_max")

#: How long a server may take to accept a connection, and how long for its first answer. Kombu would
#: wait for minutes. An app that retries more often than Celery's default waits for it, too.
FIRST_ANSWER_SECONDS, USUAL_RETRIES = 5.0, 3

#: Not Kombu's logger, which is silent unless logging is set up, as in Spark's processes.
logger = logging.getLogger(__name__)

Self = TypeVar("Self", bound="Broker")


class Broker:
    """One connection, opened on first use and again after it was lost or closed.

    Raises BrokerError if the broker keeps no backlog, and Kombu's OperationalError if it cannot
    be reached.
    """

    def __init__(self, app: Celery) -> None:
        self.app = app
        self._lock = threading.RLock()
        self._connection: Connection | None = None
        self._store: Store | None = None
        self._channel: Any = None
        self._lost = False
        #: The nodes of a Cluster whose queues this copy leaves out; see `reachable`.
        self.left_out: Collection[Node] = ()
        _all.add(self)

    def _after_fork(self) -> None:
        """Reset a child whose parent forked while another thread, now gone, was connecting."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
            return
        self._lock = threading.RLock()
        self._connection = self._store = self._channel = None

    @property
    def connection(self) -> Connection:
        """The connection that all calls share; it may not be connected yet."""
        with self._lock:
            if self._connection is None:
                self._connection = self._checked(self.app.connection_for_write())
            return self._connection

    def _checked(self, connection: Connection) -> Connection:
        transport = connection.transport
        if isinstance(transport, Transport):
            return connection
        advice = "use a Redis server, with a URL such as delayed+redis://localhost:6379/0"
        if transport.driver_type == "redis":
            advice = "put delayed+ in front of its URL"
        raise BrokerError(f"the app's broker {connection.as_uri()} keeps no backlog: {advice}")

    @property
    def store(self) -> Store:
        """The store, which moves the broker's messages."""
        store = self._store
        if store is not None and not self._lost:
            return store
        with self._lock:
            if self._lost:
                self.close()
            if self._store is None:
                self._store = self._connect()
            return self._store

    @property
    def errors_of_one_queue(self) -> tuple[type[BaseException], ...]:
        """The errors of a call after which other queues can be used: those of a Cluster's node.

        Does not connect: a handler of an error should not wait for a broker that is down.
        """
        store = self._store
        return () if store is None else store.errors_of_one_queue

    @property
    def rules(self) -> Rules | None:
        """The rules that decide about its messages, as the app declares them, or None."""
        with self._lock:
            _ = self.store  # connects
            rules: Rules | None = self._channel.rules
            return rules

    def _connect(self) -> Store:
        policy = self.app.conf.task_publish_retry_policy or {}
        options = {name: policy[name] for name in RETRY_POLICY if name in policy}
        connection = self.connection
        with connection._reraise_as_library_errors():
            retries = options.get("max_retries")
            is_patient = retries is None or retries > USUAL_RETRIES
            if not is_patient:
                _pass_over_silent_servers(connection)
            connection.ensure_connection(_Failures(connection, is_patient), **options)
            self._channel = connection.default_channel
            store = copy(self._channel.store)
        # A Cluster connection finds lost nodes again without a reconnect.
        on_lost = self._was_lost if store.cluster is None else lambda: None
        store.run = _ToldConnection(store.over(store.client).run, on_lost)
        if store.cluster is None:
            store.shards = store.shards.over(store.run)
        return store

    def reachable(self: Self) -> Self | None:
        """A copy without the nodes of a Cluster that do not answer, or None if all answer."""
        store = self.store
        run: Any = store.run
        if store.cluster is None or not (down := run.nodes_down()):
            return None
        other = copy(self)
        other.left_out = down
        other._store = store.without(down)
        other._store.run = run.without(down)
        return other

    def _was_lost(self) -> None:
        # The next call may have to try another of the URLs.
        self._lost = True

    def close(self) -> None:
        """Disconnect; the next call connects again."""
        with self._lock:
            connection, self._connection, self._store = self._connection, None, None
            self._channel = None
            self._lost = False
        if connection is not None:
            connection.release()


class _Failures:
    """Called after each attempt to connect that has failed; announces a long wait once."""

    def __init__(self, connection: Connection, is_patient: bool) -> None:
        self._connection = connection
        self._tells = is_patient

    def __call__(self, error: BaseException, interval: float) -> None:
        connection = self._connection
        # No wait for a server that refuses a password: no other one is tried, or made.
        is_denied = isinstance(error, AuthenticationError) and not connection.alt
        if is_denied and not urls.address(connection).credential_provider:
            raise error
        if self._tells:
            logger.warning("Cannot reach %s; trying again: %s", connection.as_uri(), error)
            self._tells = False


def _pass_over_silent_servers(connection: Connection) -> None:
    """Switch to a server that answers. Raises OperationalError if none does, and one is silent."""
    silence = ""
    for _ in connection.alt or [""]:
        where = urls.address(connection)
        if where.scheme != "redis":
            return
        try:
            if _answers(where.server):
                return
            silence = where.silence
        except TimeoutError:
            silence = f"{where.place} does not accept connections"
        except OSError:
            pass  # Kombu's error says it
        connection.maybe_switch_next()
    if silence:
        raise OperationalError(silence)


def _answers(address: tuple[str, int]) -> bool:
    """Whether the server answers. Raises OSError if it accepts no connection."""
    with socket.create_connection(address, FIRST_ANSWER_SECONDS) as sock:
        sock.sendall(b"*1\r\n$4\r\nPING\r\n")
        try:
            sock.recv(1)
        except TimeoutError:
            return False
        return True


def own_broker(app: Celery) -> Broker:
    """The broker shared by everything in this process that runs tasks or answers them."""
    return _broker(app, os.getpid())


@lru_cache(maxsize=8)
def _broker(app: Celery, pid: int) -> Broker:
    # A fork has connections of its own.
    return Broker(app)


_all: WeakSet[Broker] = WeakSet()


def _after_fork() -> None:
    for broker in tuple(_all):
        broker._after_fork()


forks.in_children(_after_fork)


class BrokerUnreachable(OperationalError, ConnectionError):
    """The error of `apply_async`, which can also be caught as a ConnectionError of Redis."""


class _ToldConnection:
    """A connection that raises the same error as `apply_async`.

    On a Cluster it waits for a slot that is moving to another node. Searches skip the nodes that
    it `leaves_out`.
    """

    def __init__(
        self,
        connection: ServerConnection,
        on_lost: Callable[[], None],
        leaves_out: Collection[Node] = (),
    ) -> None:
        self._connection = connection
        self._on_lost = on_lost
        self._leaves_out = leaves_out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def __call__(self, *command: Any, replicas: Replicas | None = None) -> Any:
        """Run a command. Raises OperationalError if the broker cannot be reached."""
        try:
            return self._connection.insist(*command, replicas=replicas)
        except UNREACHABLE as error:
            raise self._unreachable(error) from error

    insist = __call__

    def many(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Run commands. Raises OperationalError, or returns it in place of an answer."""
        try:
            answers = self._connection.many(commands)
        except UNREACHABLE as error:
            raise self._unreachable(error) from error
        waits = True  # until one wait fails: other commands may need the same slot
        for n, answer in enumerate(answers):
            if waits and isinstance(answer, SlotMoves):
                answers[n] = self._waited_for(commands[n])
                waits = not isinstance(answers[n], OperationalError)
            elif isinstance(answer, UNREACHABLE):
                answers[n] = self._unreachable(answer)
        return answers

    def _waited_for(self, command: Sequence[Any]) -> Any:
        try:
            return self(*command)
        except (OperationalError, ResponseError) as error:
            return error

    def everywhere(self) -> list[_ToldConnection]:
        return [
            _ToldConnection(each, self._on_lost)
            for each in self._connection.everywhere()
            if not (isinstance(each, NodeConnection) and each.node in self._leaves_out)
        ]

    def without(self, nodes: Collection[Node]) -> _ToldConnection:
        """The same connection, with searches that skip some nodes."""
        return _ToldConnection(self._connection, self._on_lost, nodes)

    def nodes_down(self) -> set[Node]:
        """The nodes of a Cluster that do not answer now."""
        found = set()
        for each in self.everywhere():
            try:
                each("PING")
            except OperationalError:
                found.add(each.node)
        return found

    def _unreachable(self, error: BaseException) -> BrokerUnreachable:
        self._on_lost()
        return BrokerUnreachable(str(error))
