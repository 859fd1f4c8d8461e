"""The Kombu side of one channel: routing, publishing, consuming."""

from __future__ import annotations

import math
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from queue import Empty
from time import monotonic
from typing import Any

import redis
from kombu.transport import redis as stock
from redis.exceptions import ResponseError

from ..connection import urls
from ..connection.connection import Replicas
from ..connection.format import Format
from ..connection.native import get_logger
from ..connection.options import Options
from ..connection.reading import watched
from ..connection.tls import TlsConnection
from ..connection.wakeup import WakeConnection
from ..consumer.claiming.sources import AUTO_DELETE
from ..consumer.consumer import Consumer
from ..consumer.lease.lease import Lease
from ..consumer.policy.decisions import Rules, planned, rules_of
from ..consumer.session import Session
from ..consumer.unacked import Message, QoS
from ..embedded import server as embedded
from ..embedded.connection import EmbeddedConnection
from ..errors import (
    UNREACHABLE,
    AlreadyDelayed,
    FormatError,
    NodeDown,
    OptionError,
    ServerNotReady,
    UrlError,
    translate,
)
from ..message.envelope import Unique, check_task, due, message_id, to_json, unique_key
from ..store.keys import format_version
from ..store.shards import LOOK_SECONDS, is_shard, number_of, queue_of
from ..store.store import Entry, Limits, Size, Store
from .replies import lifetimes
from .server_checks import check, inspect

logger = get_logger(__name__)

#: What servers of this process were found to be, by address.
_servers: dict[tuple[Any, ...], int] = {}


class Channel(stock.Channel):
    """A channel of Kombu's Redis transport whose messages wait in Redis until they are due."""

    QoS = QoS
    Message = Message
    store_class = Store
    wake_class = WakeConnection
    connection_class_ssl = TlsConnection

    #: Commands that wait longer than this for an answer count as a lost connection.
    socket_timeout = 30.0

    # Older Kombu has neither of these.
    client_name: str | None = None
    _expires: dict[str, int] = {}  # noqa: RUF012

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.consumer: Consumer | None = None
        self.subscribed_queues: frozenset[str] = frozenset()
        #: The socket over which it has subscribed: redis-py may open another one by itself.
        self.subscribed_over: Any = None
        self.listen_broken_since: float | None = None
        self.listen_retry_at = -math.inf
        self._shards_at = 0.0
        self._shard_turn = 0
        self._rules: Rules | None = None
        self._ask_pool: Any = None
        self._asking: Store | None = None
        self._ask_lock = threading.RLock()
        self._pid = os.getpid()
        self._sync_client: Any = None
        self._handlers: dict[str, Callable[[dict[str, Any]], None]] = {}
        self._receivers: dict[str, Any] = {}
        with self._told_apart():
            super().__init__(*args, **kwargs)
        self.QoS = type(self).QoS
        try:
            _ = self.store  # looks at the server
        except Exception:
            self.connection.cycle.discard(self)
            self._disconnect_pools()
            raise

    # Redis.

    @cached_property
    def options(self) -> Options:
        """The `delayed_*` transport options."""
        return Options.parse(self.connection.client.transport_options)

    @property
    def rules(self) -> Rules | None:
        """Who decides of messages that are sent and delivered here; None: nobody."""
        if self._rules is None and (found := rules_of(self.options.policies)) is not None:
            for queue in self.options.policies or {}:
                _check_one_shard(queue, self.options.shards_of(queue), found)
            self._rules = found
        return self._rules

    @cached_property
    def store(self) -> Store:
        """The moves of messages, over this channel's connection pool."""
        client = self._client_for_store()
        return self.store_class(
            client,
            prefix=self.global_keyprefix,
            priority_steps=self.priority_steps,
            separator=self.sep,
            partition_size=self.options.partition_size or self._compact_size(client),
            limits=Limits(
                self.options.max_deliveries, self.options.dead_limit, self.options.dead_seconds
            ),
            event_limit=self.options.events,
            shards=self.options.shards,
            replicas=self._replicas(),
            format=Format(format_version(self.global_keyprefix)),
        )

    def _client_for_store(self) -> Any:
        return self._client_of(self.pool)

    def _replicas(self) -> Replicas | None:
        count, seconds = self.options.replicas_to_wait, self.options.replica_timeout_seconds
        return Replicas(count, int(seconds * 1000)) if count else None

    def _client_of(self, pool: Any) -> redis.Redis:
        # The provider of streamed credentials tells the pools of those clients that name it.
        provider = pool.connection_kwargs.get("credential_provider")
        return redis.Redis(connection_pool=pool, credential_provider=provider)

    def _server(self) -> tuple[Any, ...]:
        parameters = self.pool.connection_kwargs
        return tuple(parameters.get(name) for name in ("host", "port", "path", "db"))

    def _compact_size(self, client: redis.Redis) -> int:
        server = self._server()
        if server not in _servers:
            found = inspect(client, format_version(self.global_keyprefix))
            check(
                found,
                mode="standalone",
                unsafe_server=self.options.unsafe_server,
                clock_skew_warning_seconds=self.options.clock_skew_warning_seconds,
            )
            _servers[server] = found.partition_size
        return _servers[server]

    def _create_client(self, asynchronous: bool = False) -> Any:
        if asynchronous:
            return super()._create_client(asynchronous=True)
        if self._sync_client is None or self._sync_client.connection_pool is not self.pool:
            self._sync_client = super()._create_client()
        return self._sync_client

    @cached_property
    def client(self) -> Any:
        """What Kombu looks at the server with; it has no connection of its own."""
        return self._create_client()

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        where = urls.address(self.connection.client)
        parameters: dict[str, Any] = {
            "db": self._database(where),
            "username": where.username,
            "password": where.password,
            # One more for the moment in which a signal handler or a batch needs its own.
            "max_connections": self.max_connections + 1,
            "socket_timeout": self.socket_timeout,
            "health_check_interval": self.health_check_interval,
            "retry_on_timeout": self.retry_on_timeout,
            "client_name": self.client_name,
        }
        if where.credential_provider:
            self._process_credential_provider(where.credential_provider, parameters)
        connection_class: Any
        if where.scheme == "embedded":
            parameters |= {"directory": where.path, "path": str(embedded.ensure(where.path))}
            connection_class = EmbeddedConnection
        elif where.scheme == "socket":
            parameters["path"] = where.path
            connection_class = redis.UnixDomainSocketConnection
        else:
            parameters.update(self._tcp_parameters(where))
            connection_class = (
                self.connection_class if where.ssl is None else self.connection_class_ssl
            )
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
                f"the database in the broker URL is a number from 0 on, not {where.virtual_host!r}"
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

    def _flush_brpop_reauth(self) -> None:
        """New streaming credentials: the waiting connection reconnects with them."""
        for wake in self.consumer.wakes if self.consumer else ():
            if getattr(wake.connection, "_re_auth_token", None) is not None:
                wake.connection.set_re_auth_token(None)
                wake.reset()
                self.connection.cycle.wake_up()

    @contextmanager
    def conn_or_acquire(self, client: Any = None) -> Iterator[Any]:
        """A client for Kombu's own commands, whose refusals are told apart as ours are."""
        if (store := self.__dict__.get("store")) is not None:
            store.run.lend()
        with self._told_apart(), super().conn_or_acquire(client) as client:
            yield client

    @contextmanager
    def _told_apart(self) -> Iterator[None]:
        """Errors with their meaning; a server that is not ready is looked at again."""
        try:
            yield
        except (ResponseError, ServerNotReady) as error:
            meaning = translate(error) if isinstance(error, ResponseError) else error
            if isinstance(meaning, ServerNotReady):
                _servers.clear()
            if meaning is error:
                raise
            raise meaning from error

    @staticmethod
    def _pubsub_reauth_handled_by_redis(connection: Any) -> bool:
        # Only for connections of its own PubSub, and this one was taken from the pool by hand.
        return False

    def _after_fork(self) -> None:
        if self._pid == os.getpid():
            return
        # The parent's messages and leases stay the parent's.
        self._pid = os.getpid()
        self.consumer, self._qos, self._sync_client = None, None, None
        self._ask_pool, self._asking, self._ask_lock = None, None, threading.RLock()
        for name in ("store", "client"):
            self.__dict__.pop(name, None)
        super()._after_fork()

    def resume(self) -> None:
        """In a forked child: go on consuming, as a consumer of its own."""
        if self._pid == os.getpid():
            return
        had = self.consumer.sources if self.consumer is not None else {}
        self._after_fork()
        for source in had.values():
            self._ensure_consumer().add(source.queue, source.no_ack, source.expires_ms)

    # Publishing.

    def create_publish_batch(self, max_size: int) -> Any:
        """A batch for `Producer.batch()`."""
        from .batch import PublishBatch

        return PublishBatch(self, max_size)

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> None:
        batch = kwargs.pop("_publish_batch", None)
        step = self.priority(self._get_message_priority(message, reverse=False))
        when = due(message)
        entry = Entry(message_id(message), step, to_json(message), when.argument if when else "")
        expires_ms = self._expires.get(queue) or -lifetimes[queue]
        unique = unique_key(message)
        plans_later = unique is None and getattr(batch, "plans_later", False)
        if (rules := self.rules) is not None and not plans_later:
            entry = planned(rules, queue, _task_of(message), entry, self.store)
        if batch is not None and unique is None:
            batch.add("schedule" if entry.due else "put", queue, entry, expires_ms)
            return
        try:
            if unique is not None:
                self._put_unique(
                    self.store.shards.home(queue, unique.key), entry, unique, expires_ms
                )
            else:
                self._put_in_shard(queue, entry, expires_ms)
        except ServerNotReady:
            _servers.clear()  # who reconnects looks at it again, and waits
            raise

    def _put_in_shard(self, queue: str, entry: Entry, expires_ms: int) -> None:
        put = self.store.schedule if entry.due else self.store.publish
        shard = self.store.shards.place(queue, entry.id)
        try:
            put(shard, [entry], expires_ms)
        except NodeDown:  # nothing was sent: another shard may be on a node that is up
            other = self.store.shards.place(queue, entry.id)
            if other == shard:
                raise
            put(other, [entry], expires_ms)

    def _put_unique(self, queue: str, entry: Entry, unique: Unique, expires_ms: int) -> None:
        done, other = self.store.schedule_unique(queue, entry, *unique, expires_ms)
        if done == "refused":
            raise AlreadyDelayed(unique.key, other)

    def _lookup(self, exchange: str, routing_key: str, default: str | None = None) -> list[str]:
        found = super()._lookup(exchange, routing_key, default)
        return found or self._rebind(exchange, routing_key)

    def _rebind(self, exchange: str, routing_key: str) -> list[str]:
        """The server has lost bindings that this connection has declared: declare them again."""
        table = self.state.exchanges.get(exchange, {}).get("table", [])
        if not table:
            return []
        found = list(self.typeof(exchange).lookup(table, exchange, routing_key, None))
        for binding in table:
            if found and binding[2] in found:
                self._queue_bind(exchange, *binding)
                warnings.warn(
                    f"the broker had lost the binding of queue {binding[2]!r} to exchange "
                    f"{exchange!r}; it is declared again",
                    stacklevel=2,
                )
        return found

    # Consuming.

    def _ensure_consumer(self) -> Consumer:
        if self.consumer is None:
            self.resume()
            self.consumer = self._new_consumer()
        return self.consumer

    def _new_consumer(self) -> Consumer:
        lease = Lease(
            self._lease_store(),
            self.options.lease_seconds,
            self._server(),
            self.options.consumer_name,
        )
        return Consumer(self._new_session(lease), self._new_wake())

    def _new_session(self, lease: Lease) -> Session:
        return Session(
            self.store,
            self.options,
            self.qos,
            self._queue_cycle,
            self._hand_over,
            lease,
            self.rules,
            self.patience_seconds,
        )

    def _lease_store(self) -> Store:
        """The store over connections that give up long before a lease has ended."""
        return self.store.over(self._client_of(self._keepers_pool()))

    def _keepers_pool(self) -> Any:
        """Connections that a thread of the operating system opens, uses and closes."""
        return self._impatient_pool()

    def _impatient_pool(self) -> Any:
        return self._impatient(self._get_pool())

    def _impatient(self, pool: Any) -> Any:
        limit = self.options.lease_seconds / 4
        parameters = pool.connection_kwargs
        for name in ("socket_timeout", "socket_connect_timeout"):
            if name in parameters:  # a socket of the file system has no limit for connecting
                parameters[name] = min(parameters[name] or limit, limit)
        return pool

    @property
    def _asking_store(self) -> Store:
        """As the lease's; that one's connection is the keeper's alone, whose thread is native."""
        with self._ask_lock:
            if self._asking is None:
                self._ask_pool = self._impatient_pool()
                self._asking = self.store.over(self._client_of(self._ask_pool))
            return self._asking

    @property
    def patience_seconds(self) -> float:
        """How long a lost connection is mended here before Kombu is told."""
        return 0 if len(self.connection.client.alt) > 1 else self.options.reconnect_seconds

    def _new_wake(self) -> WakeConnection:
        self._create_client(asynchronous=True)  # has its pool told of new credentials
        return self.wake_class(
            lambda: self.async_pool.get_connection(),
            lambda queue: self.store.keys(queue).wake,
            self.health_check_interval or stock.DEFAULT_HEALTH_CHECK_INTERVAL,
        )

    def basic_consume(self, queue: str, no_ack: bool, *args: Any, **kwargs: Any) -> Any:
        """Consume from `queue`."""
        result = super().basic_consume(queue, no_ack, *args, **kwargs)
        if queue not in self.active_fanout_queues:
            self._receivers[queue] = args[0] if args else kwargs.get("callback")
            self._handlers[queue] = self.connection._callbacks[queue]
            takes = no_ack or not self.ack_emulation
            consumer = self._ensure_consumer()
            shards = self.store.shards.all(queue)
            if self.rules is not None:
                _check_one_shard(queue, len(shards), self.rules)
            unused = AUTO_DELETE if queue in self.auto_delete_queues else 0
            for shard in shards:
                consumer.add(shard, takes, self._expires.get(queue, unused))
            self.connection.cycle.wake_up()
        return result

    def follow_shards(self) -> None:
        """Consume also the shards over which another process has begun to spread a queue."""
        now = monotonic()
        if self.consumer is None or now < self._shards_at:
            return
        self._shards_at = now + LOOK_SECONDS
        with suppress(*UNREACHABLE):
            sources = self.consumer.sources
            spread = [each for each in sources.values() if not is_shard(each.queue)]
            # Somebody else may have looked just before there were more.
            self.store.shards.look_at_all(source.queue for source in spread)
            for source in spread:
                shards = self.store.shards.all(source.queue)
                if self._must_stay_whole(source.queue, shards):
                    continue
                for shard in shards:
                    if source.queue in sources and shard not in sources:
                        self.consumer.add(shard, source.no_ack, source.expires_ms)

    def _must_stay_whole(self, queue: str, shards: Sequence[str]) -> bool:
        """Whether another process has spread a queue over shards that has turns or limits here."""
        if len(shards) == 1 or self.rules is None or self.rules.gate(queue) is None:
            return False
        logger.error(
            "Another process spreads queue %r over %d shards, but the queue has policies by which "
            "its messages take turns or have limits. This worker does not take the messages in "
            "the other shards, as they would exceed the limits. Set delayed_shards to 1 for "
            "this queue everywhere.",
            queue,
            len(shards),
        )
        return True

    def basic_cancel(self, consumer_tag: str) -> Any:
        """Consume no more; while `drain_events` waits in another greenlet, when it has ended."""
        result = super().basic_cancel(consumer_tag)
        if self.connection is not None:
            self.connection.cycle.wake_up()
        return result

    def _basic_cancel(self, consumer_tag: str) -> Any:
        queue = self._tag_to_queue.get(consumer_tag)
        result = super()._basic_cancel(consumer_tag)
        self.subscribed_queues &= self.active_fanout_queues
        if queue and queue not in self._active_queues and self.consumer is not None:
            # Its handler stays: a signal handler may do this while a message is handed over.
            for shard in [each for each in self.consumer.sources if queue_of(each) == queue]:
                self.consumer.remove(shard)
        return result

    def retire(self) -> None:
        """Claim no more, and give back at once what its program has not begun. Twice is safe."""
        if self.consumer is not None and self._pid == os.getpid():
            for queue in tuple(self.consumer.sources):
                self.consumer.remove(queue)
            self._flush()
            if self.connection is not None:  # a greenlet may do this when it has been closed
                self.connection.cycle.interrupt()

    def basic_qos(self, *args: Any, **kwargs: Any) -> None:
        """Change the prefetch limit."""
        super().basic_qos(*args, **kwargs)
        self.connection.cycle.wake_up()

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        """Take one message, if there is one."""
        takes = no_ack or not self.ack_emulation
        found, shard = None, queue
        for shard in self._in_turn(queue):
            if found := self._ensure_consumer().get(shard, takes):
                break
        if queue in self._expires:
            self._maybe_update_queues_expire(self._create_client(), queue)
        if found is None:
            return None
        payload, record = found
        try:
            message = self.Message(payload, channel=self)
        except Exception as error:
            tag = payload["properties"]["delivery_tag"]
            self._ensure_consumer().refuse(shard, tag, record, error, takes)
            raise
        if not no_ack:
            self.qos.append(message, message.delivery_tag)
        return message

    def _in_turn(self, queue: str) -> tuple[str, ...]:
        """The shards of a queue, another one in front each time."""
        shards = self.store.shards.all(queue)
        if self.rules is not None:
            _check_one_shard(queue, len(shards), self.rules)
        self._shard_turn += 1
        at = self._shard_turn % len(shards)
        return shards[at:] + shards[:at]

    def _hand_over(self, payload: dict[str, Any], shard: str) -> None:
        queue = shard if shard in self._handlers else queue_of(shard)
        if self._takes_tasks(queue):
            check_task(payload)
        self._handlers[queue](payload)

    def _takes_tasks(self, queue: str) -> bool:
        """Whether who consumes a queue is a Celery worker."""
        receiver = getattr(self._receivers.get(queue), "__self__", None)
        taker = getattr(receiver, "on_message", None)
        return str(getattr(taker, "__module__", "")).startswith("celery.worker.")

    def waits(self, tag: int) -> bool:
        """Its program calls `begins` before it begins on a message that was handed out.

        Returns whether it is to call `has_ended` when it has ended, whenever the message is acked.
        """
        self.qos.reserved.add(tag)
        has_slots = self.qos.slots.keep(tag)
        queue = self.qos.queue_of(tag)
        if queue and self.consumer is not None and queue not in self.consumer.sources:
            # It was being handed over when a signal handler cancelled its queue.
            self.qos.give_back_reserved(queue)
            self._flush()
        return has_slots

    def has_ended(self, tag: int) -> None:
        """What its program did with a message has ended; from any thread. Twice is safe."""
        if self.qos.slots.task_ended(tag):
            remaining = self.consumer and self.consumer.remaining
            if remaining:
                remaining.hurry()
            else:
                self.on_done()

    def begins(self, tag: int) -> bool:
        """Whether its program may begin on a message that `waits`; from any thread.

        False: it has gone back to its queue, or the lease has ended.
        """
        return self.qos.reserved.begin(tag) and self.holds(tag)

    def give_back(self, tags: Iterable[int]) -> None:
        """Put messages back at once, as what was at work on them was ended. No attempt counts."""
        for tag in tags:
            self.qos.give_back_held(tag)
        self._flush()

    def because(self, tag: int, reason: str) -> None:
        """Why a message is about to be rejected, for its dead letter."""
        self.qos.because(tag, reason)

    def holds(self, tag: int) -> bool:
        """Whether a message that was handed out and not acked is this consumer's; from any thread.

        True where the broker cannot be asked, and for what was taken for good.
        """
        if not self.ack_emulation:
            return True
        queue, consumer = self.qos.queue_of(tag), self.consumer
        if queue is None or consumer is None:
            return False
        lease = consumer.lease
        try:
            return not lease.may_have_ended(queue) or lease.renew(queue, self._asking_store)
        except UNREACHABLE:
            # The thread that consumes may have closed the connection, as it has heard of the end.
            return not lease.lost and self.qos.queue_of(tag) is not None

    def on_done(self) -> None:
        """A message was acked or rejected."""
        cycle = self.connection and self.connection.cycle
        if cycle is None or not cycle.defers_acks():
            self._flush()
        if cycle is not None:
            cycle.wake_up()

    def _flush(self) -> None:
        if self.consumer is None:
            return
        try:
            self.qos.outbox.flush(self.consumer.store, self.consumer.lease)
        except UNREACHABLE:
            if self.closed:
                raise

    def hears_over(self, connection: Any) -> bool:
        """Whether what is sent to a fanout exchange comes over a pub/sub connection."""
        return True

    @property
    def listens(self) -> bool:
        """Whether it has subscribed to all of its fanout exchanges over the present connection."""
        sock = getattr(self.subclient.connection, "_sock", None)
        is_same = sock is not None and sock is self.subscribed_over
        return is_same and self.subscribed_queues == self.active_fanout_queues

    @cached_property
    def subclient(self) -> Any:
        """The pub/sub client, which waits for nothing."""
        client = super().subclient
        client.parse_response = partial(client.parse_response, block=False)
        return client

    def _receive(self) -> bool:
        """Deliver what has come over the pub/sub connection; returns whether it was a message."""
        client, has_delivered, told = self.subclient, False, True
        while self._reads_ahead(client.connection, told):
            with suppress(Empty):
                has_delivered = bool(self._receive_one(client)) or has_delivered
            told = False
        return has_delivered

    def _reads_ahead(self, connection: Any, told: bool) -> bool:
        try:
            return connection is not None and connection.read_ahead(told, push_request=True)
        except UNREACHABLE:
            self._in_listen = None  # what `_receive_one` raises may be the program's own
            raise

    def _unsubscribe_from(self, queue: str) -> None:
        # Kombu 5.5 sends UNSUBSCRIBE for what it has subscribed to with PSUBSCRIBE.
        client = self.subclient
        if client.connection is not None and client.connection._sock is not None:
            topics = getattr(
                self, "_get_subscribe_topics", lambda q: [self._get_subscribe_topic(q)]
            )
            client.punsubscribe(*topics(queue))

    def leave(self) -> None:
        """Give everything back and end the lease."""
        if self.consumer is not None and self._pid == os.getpid():
            self.consumer.close()
            with suppress(*UNREACHABLE, FormatError):
                self._forget_unused()
            if self._ask_pool is not None:
                self._ask_pool.disconnect()

    def _forget_unused(self) -> None:
        """Of queues that delete themselves, and are empty, nothing stays; their bindings do."""
        for queue in self.auto_delete_queues & self._receivers.keys():
            for shard in self.store.shards.all(queue):
                self.store.forget_unused(shard)

    # Queues.

    def _new_queue(self, queue: str, *args: Any, **kwargs: Any) -> None:
        if is_shard(queue):
            raise OptionError(
                f"a queue cannot be named {queue!r}: so is shard {number_of(queue)} of queue "
                f"{queue_of(queue)!r}"
            )
        if self.sep in queue:
            raise OptionError(
                f"a queue cannot be named {queue!r}: {self.sep!r} stands between the name and the "
                "priority in the names of lists (transport option sep)"
            )
        super()._new_queue(queue, *args, **kwargs)

    def _sizes(self, queue: str) -> list[Size]:
        return [self.store.size(shard) for shard in self.store.shards.all(queue)]

    def _size(self, queue: str) -> int:
        return sum(size.ready + size.due for size in self._sizes(queue))

    def _has_queue(self, queue: str, **kwargs: Any) -> bool:
        return any(map(any, self._sizes(queue)))

    def _purge(self, queue: str) -> int:
        self.store.shards.look_again()
        return sum(map(self.store.purge, self.store.shards.all(queue)))

    def _drop_queue(self, queue: str, *args: Any, **kwargs: Any) -> None:
        super()._delete(queue, *args, **kwargs)

    def _delete(self, queue: str, *args: Any, **kwargs: Any) -> None:
        self._drop_queue(queue, *args, **kwargs)
        for shard in self.store.shards.all(queue):
            self.store.delete(shard)
        self.store.shards.forget(queue)

    def queue_delete(
        self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any
    ) -> Any:
        """Delete a queue; with `if_empty` only when nothing is ready or delayed in it."""
        self.store.shards.look_again()
        if if_empty and self._has_queue(queue):
            return None
        return super().queue_delete(queue, if_unused=if_unused, **kwargs)

    def close(self) -> None:
        """Give everything back and close."""
        if not self.closed:
            self.leave()
        super().close()


def _check_one_shard(queue: str, count: int, rules: Rules) -> None:
    if count > 1 and rules.gate(queue) is not None:
        raise OptionError(
            f"queue {queue!r} has policies by which its messages take turns or have limits, and "
            f"{count} shards: such a queue has one"
        )


def _task_of(message: dict[str, Any]) -> str:
    return str((message.get("headers") or {}).get("task") or "")
