"""The sending side of a channel, and the queues that an exchange leads to."""

from __future__ import annotations

import re
import warnings
from typing import Any

from kombu.exceptions import OperationalError
from redis.exceptions import ResponseError

from ...consumer.lease.consumer_id import consumer_id
from ...consumer.policy.decisions import Rules, planned
from ...consumer.policy.of_message import HEADER, USUAL, with_policies
from ...errors import AlreadyDelayed, NodeDown, ServerNotReady
from ...message.envelope import CONFLICTS, Unique, due, message_id, to_json, unique_key
from ...store.store import Entry
from .. import server_checks
from .connecting import ConnectingChannel

#: How long a late reply to remote control stays.
LATE_REPLY_MS = 60_000

#: Of how many queues the lifetimes are remembered. Only recent ones matter.
LIFETIMES = 10_000

_REMOTE_CONTROL = re.compile(r"\.reply\.[^.]+\.pidbox$")


class Lifetimes(dict[str, int]):
    """Queue -> how many milliseconds a reply stays in it; 0: it gets no replies.

    A reply that comes when nobody waits for it any more must expire.
    """

    def __missing__(self, queue: str) -> int:
        return self.note(queue, LATE_REPLY_MS if _REMOTE_CONTROL.search(queue) else 0)

    def note(self, queue: str, expires_ms: int) -> int:
        """Set how long this process's messages stay in a queue. Safe from any thread."""
        if len(self) >= LIFETIMES:
            self.clear()
        self[queue] = expires_ms
        return expires_ms


#: The lifetimes in this process.
lifetimes = Lifetimes()


class PublishingChannel(ConnectingChannel):
    """Schedules messages, or publishes them for now."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: Queues for which this channel has offered the policies of its program.
        self._offered: set[str] = set()

    def create_publish_batch(self, max_size: int) -> Any:
        """A batch for `Producer.batch()`."""
        from ..batch import PublishBatch

        return PublishBatch(self, max_size)

    def _offer(self, rules: Rules, queue: str) -> None:
        """Put this program's policies of a queue in force until a consumer declares others."""
        if text := rules.offered(queue):
            self.store.policies.offer(self.store.shards.all(queue), text, consumer_id())
        self._offered.add(queue)

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> None:
        batch = kwargs.pop("_publish_batch", None)
        timeout = kwargs.get("timeout")
        if timeout is not None or not USUAL.issuperset(message.get("properties") or ()):
            message = with_policies(message, timeout)
        step = self.priority(self._get_message_priority(message, reverse=False))
        if (when := kwargs.get("_due")) is None:
            by_header = due(message)
            when = by_header.argument if by_header else ""
        entry = Entry(message_id(message), step, to_json(message), when)
        expires_ms = self._expires.get(queue) or -lifetimes[queue]
        if expires_ms:
            self.store.shards.keep_whole(queue)
        unique = unique_key(message)
        plans_later = unique is None and getattr(batch, "plans_later", False)
        if (rules := self.rules) is not None:
            headers = message.get("headers") or {}
            task, own = str(headers.get("task") or ""), str(headers.get(HEADER) or "")
            if task and not expires_ms and queue not in self._offered:
                self._offer(rules, queue)
            if not plans_later:
                entry = planned(rules, queue, task, own, entry, self.store)
        if batch is not None and unique is None:
            batch.add("schedule" if entry.due else "put", queue, entry, expires_ms)
            return
        try:
            if unique is not None:
                if kwargs.get("_moves") and unique.conflict in CONFLICTS:
                    unique = unique._replace(conflict="refuse", replaces=False)  # no new task
                self._put_unique(
                    self.store.shards.home(queue, unique.key), entry, unique, expires_ms
                )
            else:
                self._put_in_shard(queue, entry, expires_ms)
        except ServerNotReady:
            server_checks.look_again()  # reconnecting checks the server again, and waits
            raise
        except ResponseError as error:
            raise _refused(error) from error

    def _put_fanout(self, *args: Any, **kwargs: Any) -> None:
        """As the stock channel. Raises OperationalError if the server refuses."""
        try:
            super()._put_fanout(*args, **kwargs)
        except ResponseError as error:
            raise _refused(error) from error

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
        key, conflict, *more = unique
        done, other = self.store.schedule_unique(queue, entry, key, conflict, expires_ms, *more)
        if done == "refused":
            raise AlreadyDelayed(unique.key, other)

    def _lookup(self, exchange: str, routing_key: str, default: str | None = None) -> list[str]:
        self.bind_refused()
        found = super()._lookup(exchange, routing_key, default)
        return found or self._rebind(exchange, routing_key)

    def _rebind(self, exchange: str, routing_key: str) -> list[str]:
        """Declare bindings of this connection again that the server lost; returns their queues."""
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


def _refused(error: ResponseError) -> Exception:
    """The OperationalError that callers of Kombu expect."""
    return error if isinstance(error, OperationalError) else OperationalError(str(error))
