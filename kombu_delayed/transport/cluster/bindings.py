"""Bindings on a Cluster, each in the slot of its exchange."""

from __future__ import annotations

from time import monotonic

from kombu.utils.encoding import bytes_to_str

from ...connection.native import get_logger
from ...errors import UNREACHABLE, NodeDown, ServerFull
from ...store.keys import bindings, lasting_bindings
from ..channel.connecting import ConnectingChannel

logger = get_logger(__name__)

#: A binding that could not be written is tried again after this time.
RETRY_SECONDS = 1.0

#: Errors of a node that may be able to store a binding soon.
_NOT_NOW: tuple[type[BaseException], ...] = (*UNREACHABLE, ServerFull)


class ClusterBindings:
    """The bindings of a channel. Those that cannot be written now are kept for later."""

    def __init__(self, channel: ConnectingChannel) -> None:
        self._channel = channel
        #: Bindings that are not on their node yet, (exchange, member) -> queue.
        self._missing: dict[tuple[str, str], str] = {}
        self._retry_at = 0.0
        #: The bindings of exchanges as they were read last.
        self._tables: dict[str, list[tuple[str, ...]]] = {}

    def member(self, routing_key: str, pattern: str, queue: str) -> str:
        """A binding in the form that it has in the set of its exchange."""
        member: str = self._channel.sep.join([routing_key or "", pattern or "", queue or ""])
        return member

    def declare(self, exchange: str, member: str, queue: str) -> None:
        """Bind a queue now, or when the node is back."""
        self._missing[exchange, member] = queue
        self._write_missing()
        if (exchange, member) in self._missing:
            # No error, so that the caller continues with other bindings.
            logger.warning(
                "Queue %r is bound to exchange %r when its node can store that", queue, exchange
            )

    def retry(self) -> None:
        """Bind what could not be bound when it was declared, if it is time to."""
        if self._missing and monotonic() >= self._retry_at:
            self._write_missing()

    def _write_missing(self) -> None:
        self._retry_at = monotonic() + RETRY_SECONDS
        for (exchange, member), queue in tuple(self._missing.items()):
            self._missing.pop((exchange, member), None)
            try:
                self.write(exchange, member, queue)
            except _NOT_NOW as error:
                logger.info("Cannot bind queue %r to exchange %r now: %s", queue, exchange, error)
                self._missing[exchange, member] = queue

    def write(self, exchange: str, member: str, queue: str) -> None:
        """Bind a queue. Raises connection errors."""
        channel = self._channel
        run, prefix = channel.store.run, channel.global_keyprefix
        table, lasting = bindings(exchange, prefix), lasting_bindings(exchange, prefix)
        expires = queue in channel._expires and hasattr(channel, "_binding_ttl")
        run.insist("SADD", table, member)
        if not expires:
            run.insist("SADD", lasting, member)
        if run("EXISTS", lasting):
            run("PERSIST", table)
        else:
            run("PEXPIRE", table, channel._binding_ttl(queue))

    def drop(self, exchange: str, member: str) -> None:
        """Remove a binding."""
        self._missing.pop((exchange, member), None)
        for key in (bindings, lasting_bindings):
            self._channel.store.run("SREM", key(exchange, self._channel.global_keyprefix), member)

    def table(self, exchange: str) -> list[tuple[str, ...]]:
        """The bindings of an exchange, each as (routing key, pattern, queue)."""
        channel = self._channel
        if self._missing:
            self._write_missing()
        try:
            key = bindings(exchange, channel.global_keyprefix)
            found = channel.store.run.insist("SMEMBERS", key)
        except NodeDown:  # shards of its queues may be on other nodes
            declared = channel.state.exchanges.get(exchange, {}).get("table")
            if known := self._tables.get(exchange) or declared:
                return [*known]
            raise
        table = [tuple(bytes_to_str(each).split(channel.sep)) for each in found]
        self._tables[exchange] = table
        return table
