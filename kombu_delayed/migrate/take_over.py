"""Moves messages from the stock transport to this one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from kombu.utils.json import loads

from ..connection.stock import stock_consumers
from ..errors import MessageError, OptionError
from ..message.envelope import due, open_envelope, to_json
from ..store.store import CALL_LIMIT, chunks
from .migration import Entry, Migration, text_of

if TYPE_CHECKING:
    from ..transport.channel.channel import Channel

#: Deep in a list one call takes fewer messages, as the server walks there for each.
LIST_WALK = 1_000_000

#: A time in seconds that is later than any other.
ALWAYS = 1e300


def _seconds(name: str, given: Any) -> float:
    if isinstance(given, (int, float)) and given >= 0:
        return given
    raise OptionError(f"{name}={given!r} is not a number of seconds")


class ToDelayed(Migration):
    """Moves messages that stock workers held, and ETA messages in ready lists, to the backlog."""

    def __init__(
        self,
        channel: Channel,
        queues: Iterable[str] = (),
        *,
        older_than_seconds: float | None = None,
        dry: bool = False,
        **_: Any,
    ) -> None:
        super().__init__(channel, queues, dry=dry)
        self._longest = _seconds("visibility_timeout", channel.visibility_timeout)
        given = self._longest if older_than_seconds is None else older_than_seconds
        self.older_than_seconds = _seconds("older_than_seconds", given)
        self._unacked = channel.global_keyprefix + channel.unacked_key
        self._index = channel.global_keyprefix + channel.unacked_index_key
        self._table = cache(channel.get_table)

    def blockers(self) -> list[str]:
        """Return running stock workers: messages taken from them too early would run twice."""
        if self.older_than_seconds >= self._longest:
            return []
        running = stock_consumers(self.client)
        if running is None:
            return [
                "the user of the URL may not list clients, so running stock consumers are not "
                "noticed, and the messages that they hold would run twice. Stop them first, and "
                "give the user the right +client|list"
            ]
        if not running:
            return []
        return [
            f"stock consumers are connected: {len(running)} ({', '.join(running[:5])}). The "
            "messages that they hold would run twice. Stop them first"
        ]

    def steps(self) -> Iterator[int]:
        """Move messages that stock workers held, then those in ready lists."""
        yield from self._unacked_steps()
        for queue in self.queues():
            keys = self.store.keys(queue)
            for key, step in zip(keys.ready, keys.steps, strict=True):
                yield from self._ready_steps(queue, key, step.encode())

    def _unacked_steps(self) -> Iterator[int]:
        cursor = None
        while cursor != 0:
            cursor, found = self.client.hscan(self._unacked, cursor or 0, count=CALL_LIMIT)
            page = list(found.items())
            for part in chunks(page):
                self._take_over(part)
                yield len(part)

    def _take_over(self, page: Sequence[tuple[bytes, bytes]]) -> None:
        now_ms, until = self.store.now_ms(), ALWAYS
        if self.older_than_seconds > 0:
            until = now_ms / 1000 - self.older_than_seconds
        scores = self.client.zmscore(self._index, [tag for tag, _ in page])
        # The age of a message that is in no index is unknown.
        since = [ALWAYS if score is None else score for score in scores]
        batches: dict[tuple[str, ...], list[Entry]] = {}
        # The last one first, so that the one which was delivered first is the next to leave.
        for score, (tag, text) in sorted(zip(since, page, strict=True), reverse=True):
            if score > until:
                self.report.young += 1
                continue
            try:
                queues, entry = self._read(tag, text)
            except MessageError as error:
                self.report.leave(self._unacked, text_of(tag), str(error))
            else:
                batches.setdefault(queues, []).append(entry)
        for queues, entries in batches.items():
            self._take(queues, entries, until, now_ms)

    def _read(self, tag: bytes, text: bytes) -> tuple[tuple[str, ...], Entry]:
        """Read a message that a stock worker held. Returns the queues it goes back to, and it."""
        try:
            payload, exchange, routing_key = loads(text)
        except Exception as error:  # JSON that rebuilds Python objects may raise anything
            raise MessageError(f"it is not a message with its routing: {error}") from error
        exchange, routing_key = exchange or "", routing_key or ""
        if not (isinstance(exchange, str) and isinstance(routing_key, str)):
            raise MessageError("its routing is not text")
        envelope = open_envelope(to_json(payload).encode(), 0)
        when = due(envelope.payload)
        queues = self._lookup(exchange, routing_key)
        if not queues:
            raise MessageError(f"no queue is bound to exchange {exchange!r} for {routing_key!r}")
        payload["headers"] = {**(payload.get("headers") or {}), "redelivered": True}
        payload["properties"].setdefault("delivery_info", {})["redelivered"] = True
        step = self.channel.priority(self.channel._get_message_priority(payload))
        record = chr(48 + step) + to_json(payload)
        return queues, Entry(tag, envelope.id, (when and when.at_ms) or 0, record.encode())

    def _lookup(self, exchange: str, routing_key: str) -> tuple[str, ...]:
        if not exchange:
            return (routing_key,) if routing_key else ()
        found = set()
        for binding in self._table(exchange):
            key, pattern, queue = [*binding, "", ""][:3]
            if key == routing_key or (pattern and re.match(pattern, routing_key)):
                found.add(queue)
        return tuple(sorted(found - {""}))

    def _take(
        self, queues: Sequence[str], entries: Sequence[Entry], until: float, now_ms: int
    ) -> None:
        later = sum(entry.due_ms > now_ms for entry in entries)
        answers = [(later, len(entries) - later)] * len(queues)
        if not self.dry:
            answers = self._transaction(
                self._call(
                    queue, "unacked", entries, until_seconds=until, keep=int(queue != queues[-1])
                )
                for queue in queues
            )
        for queue, (delayed, ready) in zip(queues, answers, strict=True):
            self.report.count(queue, "stock unacked", "delayed", delayed)
            self.report.count(queue, "stock unacked", "ready", ready)

    def _ready_steps(self, queue: str, key: str, step: bytes) -> Iterator[int]:
        # From the left: messages that producers add move the others right, so none is missed.
        start = 0
        while page := self.client.lrange(key, start, start + CALL_LIMIT - 1):
            entries = self._not_yet_due(queue, key, step, page)
            moved = 0
            size = max(10, min(CALL_LIMIT, LIST_WALK // (start + 1)))
            for part in chunks(entries, size):
                moved += self._take_ready(queue, part, start)
            self.report.count(queue, "ready", "delayed", len(entries) if self.dry else moved)
            start += len(page) - moved
            yield len(page)

    def _take_ready(self, queue: str, entries: Sequence[Entry], start: int) -> int:
        if self.dry:
            return 0
        stop = start + 2 * CALL_LIMIT - 1
        ((delayed, _),) = self._transaction(
            [self._call(queue, "ready", entries, start=start, stop=stop)]
        )
        return delayed

    def _not_yet_due(self, queue: str, key: str, step: bytes, page: Sequence[bytes]) -> list[Entry]:
        now_ms = self.store.now_ms()
        entries = []
        for text in page:
            try:
                envelope = open_envelope(self.store.readable(queue, text), 0)
            except MessageError as error:
                self.report.leave(key, text_of(text[:40]), str(error))
                continue
            when = due(envelope.payload) if envelope.due_ms is None else None
            if when and when.at_ms and when.at_ms > now_ms:
                entries.append(Entry(b"", envelope.id, when.at_ms, step + text))
        return entries
