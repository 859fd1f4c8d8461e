"""The consuming side of a channel: queues and their shards, single messages, and the end."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from kombu.transport import redis as stock

from ...connection.native import get_logger
from ...connection.wakeup import WakeConnection
from ...consumer.claiming.sources import AUTO_DELETE
from ...consumer.consumer import Consumer
from ...consumer.lease.lease import Lease
from ...consumer.session import Session
from ...consumer.unacked import FOR_CELERY, TAKEN_FROM, Message, QoS
from ...errors import UNREACHABLE, FormatError, NotReplicated, ServerFull
from ...message.envelope import check_task, message_id, to_json
from ...store.calls import instrumentation
from ...store.calls.shards import LOOK_SECONDS, is_shard, queue_of
from ...store.store import Entry
from .connecting import ConnectingChannel, check_one_shard
from .handed_out import HandedOut

logger = get_logger(__name__)


class ConsumingChannel(ConnectingChannel):
    """Has a consumer as soon as it consumes a queue, or gets a single message from one."""

    QoS = QoS
    Message = Message
    wake_class = WakeConnection

    consumer: Consumer | None = None
    _qos: Any = None
    _shards_at = 0.0
    _shard_turn = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.handed_out = HandedOut(self)
        self._handlers: dict[str, Callable[[dict[str, Any]], None]] = {}
        self._receivers: dict[str, Any] = {}
        #: Consumer tag -> its receiver and handler, and whether it takes messages without acks: a
        #: queue may have several consumers, of which the last one gets the messages.
        self._takers: dict[str, tuple[Any, Any, bool]] = {}
        super().__init__(*args, **kwargs)
        self.QoS = type(self).QoS

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
            tuple(sorted(self.connection.client.alt)) or self.connection.client.as_uri(),
        )

    def _new_wake(self) -> WakeConnection:
        self._create_client(asynchronous=True)  # so that its pool gets new credentials
        return self.wake_class(
            lambda: self.async_pool.get_connection(),
            lambda queue: self.store.keys(queue).wake,
            self.health_check_interval or stock.DEFAULT_HEALTH_CHECK_INTERVAL,
        )

    def _flush_brpop_reauth(self) -> None:
        """New streaming credentials: the waiting connection reconnects with them."""
        for wake in self.consumer.wakes if self.consumer else ():
            if getattr(wake.connection, "_re_auth_token", None) is not None:
                wake.connection.set_re_auth_token(None)
                wake.reset()
                self.connection.cycle.wake_up()

    def _after_fork(self) -> None:
        if self._pid == os.getpid():
            return
        # The parent's messages and leases stay the parent's.
        prefetch_count = self._qos.prefetch_count if self._qos is not None else 0
        self.consumer, self._qos, self.handed_out = None, None, HandedOut(self)
        if prefetch_count:
            self.qos.prefetch_count = prefetch_count
        super()._after_fork()

    def resume(self) -> None:
        """Go on consuming in a forked child, as a consumer of its own."""
        if self._pid == os.getpid():
            return
        had = self.consumer.sources if self.consumer is not None else {}
        self._after_fork()
        for source in had.values():
            self._ensure_consumer().add(source.queue, source.no_ack, source.expires_ms)

    # Queues and their shards.

    def basic_consume(self, queue: str, no_ack: bool, *args: Any, **kwargs: Any) -> Any:
        """Consume from `queue`."""
        result = super().basic_consume(queue, no_ack, *args, **kwargs)
        if queue not in self.active_fanout_queues:
            self._receivers[queue] = args[0] if args else kwargs.get("callback")
            self._handlers[queue] = self.connection._callbacks[queue]
            tag = args[1] if len(args) > 1 else kwargs.get("consumer_tag", "")
            takes = no_ack or not self.ack_emulation
            self._takers[tag] = self._receivers[queue], self._handlers[queue], takes
            consumer = self._ensure_consumer()
            for shard in self._shards(queue):
                self.store.dictionaries.check(shard)
                consumer.add(shard, takes, self._lifetime(queue))
            if (meter := instrumentation.current) is not None:
                meter.consuming(queue)
            self.connection.cycle.wake_up()
        return result

    def _lifetime(self, queue: str) -> int:
        """After how many ms without use a queue expires, 0 for never, or AUTO_DELETE."""
        return self._expires.get(queue, AUTO_DELETE if queue in self.auto_delete_queues else 0)

    @property
    def active_queues(self) -> list[str]:
        """The queues of its consumers, in their order: older Kombu has an unordered set."""
        fanout = self.active_fanout_queues
        return list(dict.fromkeys(each for each in self._active_queues if each not in fanout))

    def _shards(self, queue: str) -> tuple[str, ...]:
        shards = self.store.shards.all(queue)
        if self.rules is not None:
            check_one_shard(queue, len(shards), self.rules)
        return shards

    def keep_up(self) -> None:
        """Leave queues that are not used any more, and consume shards that others have added.

        Also binds what a full server has refused.
        """
        now = monotonic()
        if self.consumer is None or self._pid != os.getpid() or now < self._shards_at:
            return
        self._shards_at = now + LOOK_SECONDS
        with suppress(*UNREACHABLE, ServerFull):
            self.bind_refused()
        with suppress(*UNREACHABLE):
            self._leave_unused()
        with suppress(*UNREACHABLE):
            sources = self.consumer.sources
            spread = [each for each in sources.values() if not is_shard(each.queue)]
            # The last look, for something else, may have come just before there were more.
            self.store.shards.look_at_all(source.queue for source in spread)
            for source in spread:
                shards = self.store.shards.all(source.queue)
                if self._must_stay_whole(source.queue, shards):
                    continue
                for shard in shards:
                    if source.queue in sources and shard not in sources:
                        self.consumer.add(shard, source.no_ack, source.expires_ms)

    def _leave_unused(self) -> None:
        if (consumer := self.consumer) is None:
            return
        consumer.leave_unused()
        kept = {queue_of(each) for each in (*consumer.lease.queues, *consumer.sources)}
        for queue in self._handlers.keys() - kept - self.auto_delete_queues:
            del self._handlers[queue], self._receivers[queue]

    def _must_stay_whole(self, queue: str, shards: Sequence[str]) -> bool:
        """Whether another process has spread a queue whose policies here need one shard."""
        gate = self.rules.gate(queue) if len(shards) > 1 and self.rules is not None else None
        if gate is None or not gate.is_whole:
            return False
        logger.error(
            "Another process spreads queue %r over %d shards, but the queue has policies for order "
            "or limits. This worker takes no messages from the other shards, because they would "
            "exceed the limits. Set delayed_shards to 1 for this queue everywhere.",
            queue,
            len(shards),
        )
        return True

    def basic_cancel(self, consumer_tag: str) -> Any:
        """Stop consuming, after a `drain_events` that waits in another greenlet has ended."""
        result = super().basic_cancel(consumer_tag)
        if self.connection is not None:
            self.connection.cycle.wake_up()
        return result

    def _basic_cancel(self, consumer_tag: str) -> Any:
        if self.connection is None:  # a callback has closed the channel
            return None
        queue = self._tag_to_queue.get(consumer_tag)
        result = super()._basic_cancel(consumer_tag)
        self._takers.pop(consumer_tag, None)
        if queue and self.consumer is not None:
            sources = [s for s in self.consumer.sources.values() if s.whole == queue]
            others = [t for tag, t in self._takers.items() if self._tag_to_queue.get(tag) == queue]
            if others:
                self._receivers[queue], self._handlers[queue], takes = others[-1]
                for source in [each for each in sources if each.no_ack != takes]:
                    self.consumer.add(source.queue, takes, source.expires_ms)
            else:
                # Its handler stays: a signal handler may do this while a message is handed over.
                for source in sources:
                    self.consumer.remove(source.queue)
        return result

    # Messages.

    def basic_qos(self, *args: Any, **kwargs: Any) -> None:
        """Change the prefetch limit."""
        super().basic_qos(*args, **kwargs)
        if self.connection is not None:
            self.connection.cycle.wake_up()

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        """Take one message, if there is one."""
        takes = no_ack or not self.ack_emulation
        found, shard = None, queue
        for shard in self._in_turn(queue):
            if found := self._ensure_consumer().get(shard, takes, self._lifetime(queue)):
                break
        self.keep_up()
        if queue in self._expires:
            self._maybe_update_queues_expire(self._create_client(), queue)
        if found is None:
            return None
        payload, record = found
        if not self.ack_emulation:
            payload[TAKEN_FROM] = shard
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
        """The shards of a queue, with another one in front each time."""
        shards = self._shards(queue)
        self._shard_turn += 1
        at = self._shard_turn % len(shards)
        return shards[at:] + shards[:at]

    def _hand_over(self, payload: dict[str, Any], shard: str) -> None:
        queue = shard if shard in self._handlers else queue_of(shard)
        receiver = getattr(self._receivers.get(queue), "__self__", None)
        taker = getattr(receiver, "on_message", None)
        if str(getattr(taker, "__module__", "")).startswith("celery.worker."):
            check_task(payload)
            payload[FOR_CELERY] = True
        if not self.ack_emulation:
            payload[TAKEN_FROM] = shard
        self._handlers[queue](payload)

    def send_again(self, payload: dict[str, Any]) -> None:
        """Requeue a message without ack emulation. A copy from a fanout exchange has no queue."""
        if (shard := payload.get(TAKEN_FROM)) is None:
            return
        ours = {FOR_CELERY, TAKEN_FROM}
        message = {name: value for name, value in payload.items() if name not in ours}
        info = {**payload["properties"]["delivery_info"], "redelivered": True}
        new = {"delivery_info": info, "delivery_tag": self._next_delivery_tag()}
        message["properties"] = {**payload["properties"], **new}
        message["headers"] = {**payload["headers"], "redelivered": True}
        message["headers"].pop("x-delay", None)  # it has waited
        step = self.priority(self._get_message_priority(message))
        entry = Entry(message_id(message), step, to_json(message))
        with suppress(NotReplicated):  # it is stored, and only its producer needs to know
            self.store.publish(shard, [entry], self._expires.get(queue_of(shard), 0))

    def on_done(self) -> None:
        """Have acks and rejects sent soon, after a message was acked or rejected."""
        cycle = self.connection and self.connection.cycle
        if cycle is None or not cycle.wake_up():
            self.flush()

    def flush(self) -> None:
        """Tell the server about acks, rejects and slots; what fails stays for the next time."""
        if self.consumer is None:
            return
        try:
            self.qos.outbox.flush(self.consumer.store, self.consumer.lease)
            self.consumer.store.run.push()  # a signal handler may have come between
            self.consumer.give_back_slots()
        except UNREACHABLE as error:
            logger.debug("Cannot send acknowledgements now: %s", error)

    # The end.

    def retire(self) -> None:
        """Stop claiming, and give back at once what has not started. Safe to call twice."""
        if self.consumer is not None and self._pid == os.getpid():
            for queue in tuple(self.consumer.sources):
                self.consumer.remove(queue)
            self.flush()
            if self.connection is not None:  # a greenlet may do this after the channel is closed
                self.connection.cycle.interrupt()

    def leave(self) -> None:
        """Give everything back and end the lease."""
        if self.consumer is not None and self._pid == os.getpid():
            self.consumer.close()
            with suppress(*UNREACHABLE, FormatError):
                self._forget_unused()
            self.handed_out.hang_up()

    def _forget_unused(self) -> None:
        """Remove empty queues that delete themselves; only their bindings stay."""
        for queue in self.auto_delete_queues & self._receivers.keys():
            for shard in self.store.shards.all(queue):
                self.store.forget_unused(shard)

    def close(self) -> None:
        """Give everything back and close."""
        if not self.closed:
            self.leave()
        super().close()
