"""Takes over what the stock Redis transport left behind, and hands everything back.

python -m kombu_delayed.migrate to-delayed redis://localhost:6379/0
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from kombu import Connection
from kombu.utils.json import loads
from redis.exceptions import RedisError, ResponseError

from ..errors import UNREACHABLE, DelayedError, MessageError, UrlError
from ..message.envelope import due, open_envelope, open_kept, to_json
from ..store.keys import literal
from ..store.scripts import script
from ..store.shards import label, queue_of
from ..store.store import CALL_LIMIT, Store
from .dead import dead_steps
from .gather import gather_steps

if TYPE_CHECKING:
    from ..transport.channel import Channel

Direction: TypeAlias = Literal["to-delayed", "to-stock"]
Progress: TypeAlias = Callable[[int], Any]

#: Messages that stay are listed up to so many; the others are counted.
LIST_LIMIT = 1_000

#: Deep in a list one call takes fewer messages, as each costs a walk there.
LIST_WALK = 1_000_000

#: Stands for "whenever" where a time in seconds is compared.
ALWAYS = 1e300

#: What a migration may fail with.
FAILURES: tuple[type[BaseException], ...] = (DelayedError, RedisError, *UNREACHABLE)


class MigrationRefused(DelayedError):
    """The messages cannot be moved safely now."""


class Move(NamedTuple):
    """Messages of one queue change their state."""

    queue: str
    source: str
    target: str


class Left(NamedTuple):
    """A message that stays under its key."""

    key: str
    id: str
    reason: str


@dataclass
class Report:
    """What would move, or has moved. `young` are held by the stock transport for too short a time.

    `seen` counts the messages looked at, `left` are the first of those that stay for a reason.
    """

    moves: Counter[Move] = field(default_factory=Counter)
    left: list[Left] = field(default_factory=list)
    left_count: int = 0
    young: int = 0
    seen: int = 0
    blockers: list[str] = field(default_factory=list)

    @property
    def moved(self) -> int:
        """How many messages there are in all moves."""
        return sum(self.moves.values())

    def count(self, queue: str, source: str, target: str, messages: int) -> None:
        """Add to one move."""
        if messages:
            self.moves[Move(label(queue), source, target)] += messages

    def leave(self, key: str, id: str, reason: str) -> None:
        """Note a message that stays."""
        self.left_count += 1
        if len(self.left) < LIST_LIMIT:
            self.left.append(Left(key, id, reason))


class Entry(NamedTuple):
    """One message for migrate.lua: `name` is its tag, or its member in the backlog."""

    name: bytes
    id: str
    due_ms: int
    record: bytes


class Migration:
    """One direction. Its `steps` move a page each; between any two of them it may be killed."""

    def __init__(self, channel: Channel, queues: Iterable[str] = (), *, dry: bool = False) -> None:
        if channel.store.tagged:
            raise UrlError("a Cluster has no stock transport to move messages from, or back to")
        self.channel = channel
        self.store: Store = channel.store
        self.client: Any = channel.store.client
        self.report = Report()
        self.dry = dry
        self._given = tuple(queues)

    def blockers(self) -> list[str]:
        """Why it would not be safe now."""
        raise NotImplementedError

    def steps(self) -> Iterator[int]:
        """Move page by page; yields how many messages each step has looked at."""
        raise NotImplementedError

    def run(self, progress: Progress | None = None) -> Report:
        """Take all steps."""
        for seen in self.steps():
            self.report.seen += seen
            if progress is not None:
                progress(seen)
        return self.report

    def queues(self) -> list[str]:
        """The queues that were named, that a binding names, or that have a backlog."""
        found = {*self._given, *(queue for queue, _ in self._scan("messages"))}
        for key in self.client.scan_iter(match=self._glob("_kombu.binding.*"), count=1000):
            for binding in self.client.smembers(key):
                found.add(_text(binding).split(self.channel.sep)[-1])
        return sorted(found - {""})

    def _scan(self, name: str) -> Iterator[tuple[str, str]]:
        """Queues with a key of ours of this name, and what follows the name in it."""
        skip = len(self.channel.global_keyprefix) + 1
        for key in self.client.scan_iter(match=self._glob("{*}:" + name), count=1000):
            queue, _, rest = _text(key)[skip:].partition("}:" + name.removesuffix("*"))
            yield queue, rest

    def _glob(self, pattern: str) -> str:
        return literal(self.channel.global_keyprefix) + pattern

    def _now_ms(self) -> int:
        seconds, microseconds = self.client.time()
        given = self.store.now
        server_ms = 0 if given and given[0] != "+" else seconds * 1000 + microseconds // 1000
        return server_ms + int(given or 0)

    def _call(self, queue: str, source: str, entries: Sequence[Entry], **more: Any) -> Any:
        """Arguments of migrate.lua."""
        keys, prefix = self.store.keys(queue), self.channel.global_keyprefix
        return script("migrate").pack(
            {
                "partitions": keys.partitions,
                "delayed": keys.delayed,
                "messages": keys.messages,
                "duplicates": keys.duplicates,
                "wake": keys.wake,
                "stock_unacked": prefix + self.channel.unacked_key,
                "stock_index": prefix + self.channel.unacked_index_key,
                "ready": keys.ready,
                "now": self.store.now,
                "partition_size": self.store.partition_size,
                "steps": keys.steps,
                "source": source,
                "entries": [part for entry in entries for part in entry],
                **{"until_seconds": 0, "keep": 0, "start": 0, "stop": 0, **more},
            }
        )

    def _transaction(self, calls: Iterable[Any]) -> list[tuple[int, int]]:
        """Run migrate.lua with each of these arguments, all or none; returns (delayed, ready)."""
        with self.client.pipeline(transaction=True) as pipeline:
            for call in calls:
                pipeline.execute_command("EVAL", script("migrate").source, *call)
            return [(delayed, ready) for delayed, ready in pipeline.execute()]


class ToDelayed(Migration):
    """From the stock transport: what its workers held, and ETA messages in ready lists."""

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
        longest = channel.visibility_timeout
        self.older_than_seconds = longest if older_than_seconds is None else older_than_seconds
        self._unacked = channel.global_keyprefix + channel.unacked_key
        self._index = channel.global_keyprefix + channel.unacked_index_key
        self._table = cache(channel.get_table)

    def blockers(self) -> list[str]:
        """Stock workers that run would run a second time what is taken from them early."""
        if self.older_than_seconds >= self.channel.visibility_timeout:
            return []
        running = self._stock_consumers()
        if not running:
            return []
        return [
            f"{len(running)} stock consumers are connected ({', '.join(running[:5])}): what they "
            "hold would run twice. Stop them first"
        ]

    def _stock_consumers(self) -> list[str]:
        """Clients that wait as only the stock transport's consumers do."""
        database = str(self.client.connection_pool.connection_kwargs.get("db") or 0)
        with contextlib.suppress(ResponseError):  # the user may not list clients
            return [
                f"{each.get('name') or 'client'} {each['addr']}"
                for each in self.client.client_list()
                if each.get("cmd") == "brpop" and each.get("db") == database
            ]
        return []

    def steps(self) -> Iterator[int]:
        """First what stock workers held, then the ready lists."""
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
            for at in range(0, len(page), CALL_LIMIT):
                part = page[at : at + CALL_LIMIT]
                self._take_over(part)
                yield len(part)

    def _take_over(self, page: Sequence[tuple[bytes, bytes]]) -> None:
        now_ms, until = self._now_ms(), ALWAYS
        if self.older_than_seconds > 0:
            until = now_ms / 1000 - self.older_than_seconds
        scores = self.client.zmscore(self._index, [tag for tag, _ in page])
        # One that is in no index is of unknown age.
        since = [ALWAYS if score is None else score for score in scores]
        batches: dict[tuple[str, ...], list[Entry]] = {}
        # The last one first, so that the next one to leave is who was delivered first.
        for score, (tag, text) in sorted(zip(since, page, strict=True), reverse=True):
            if score > until:
                self.report.young += 1
                continue
            try:
                queues, entry = self._read(tag, text)
            except MessageError as error:
                self.report.leave(self._unacked, _text(tag), str(error))
            else:
                batches.setdefault(queues, []).append(entry)
        for queues, entries in batches.items():
            self._take(queues, entries, until, now_ms)

    def _read(self, tag: bytes, text: bytes) -> tuple[tuple[str, ...], Entry]:
        """A message that a stock worker held, and the queues to which it goes back."""
        try:
            payload, exchange, routing_key = loads(text)
        except Exception as error:  # as any JSON that rebuilds Python objects
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
        # From the left: what producers add moves elements to the right, so none is passed over.
        start = 0
        while page := self.client.lrange(key, start, start + CALL_LIMIT - 1):
            entries = self._not_yet_due(key, step, page)
            moved = 0
            size = max(10, min(CALL_LIMIT, LIST_WALK // (start + 1)))
            for at in range(0, len(entries), size):
                part = entries[at : at + size]
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

    def _not_yet_due(self, key: str, step: bytes, page: Sequence[bytes]) -> list[Entry]:
        now_ms = self._now_ms()
        entries = []
        for text in page:
            try:
                envelope = open_envelope(text, 0)
            except MessageError as error:
                self.report.leave(key, _text(text[:40]), str(error))
                continue
            when = due(envelope.payload) if envelope.due_ms is None else None
            if when and when.at_ms and when.at_ms > now_ms:
                entries.append(Entry(b"", envelope.id, when.at_ms, step + text))
        return entries


class ToStock(Migration):
    """Back to the stock transport: the backlog, what dead consumers of ours held, dead letters."""

    def __init__(
        self,
        channel: Channel,
        queues: Iterable[str] = (),
        *,
        force: bool = False,
        dead: bool = False,
        dry: bool = False,
        **_: Any,
    ) -> None:
        super().__init__(channel, queues, dry=dry)
        self.force = force
        self.dead = dead

    def blockers(self) -> list[str]:
        """Consumers of ours that run would put the messages back into the backlog."""
        return [
            f"{len(live)} consumers of queue {queue!r} run on this transport "
            f"({', '.join(sorted(live)[:5])}): they would put the messages back into the backlog. "
            "Stop them; a killed one counts until its lease ends"
            for queue in self.queues()
            if (live := self._consumers(queue)[0])
        ]

    def _consumers(self, queue: str) -> tuple[set[str], set[str]]:
        """Those whose lease lasts, and those whose lease has ended."""
        now_ms = self._now_ms()
        found = self.client.zrange(self.store.keys(queue).consumers, 0, -1, withscores=True)
        live = {name.decode() for name, end_ms in found if end_ms > now_ms}
        return live, {name.decode() for name, _ in found} - live

    def queues(self) -> list[str]:
        """Also those of which only unacknowledged messages, or dead letters, are left."""
        names = ("unacked:*", "dead") if self.dead else ("unacked:*",)
        found = {queue for name in names for queue, _ in self._scan(name)}
        queues = {queue_of(name) for name in {*super().queues(), *found}}
        return sorted({shard for queue in queues for shard in self.store.shards.all(queue)})

    def steps(self) -> Iterator[int]:
        """What dead consumers held, then the backlog, the earliest first, then dead letters."""
        holders = list(self._scan("unacked:*"))
        for queue in self.queues():
            live, dead = self._consumers(queue)
            dead |= {name for holder, name in holders if holder == queue} - live
            for consumer in sorted(dead):
                yield self._reclaim(queue, consumer)
            yield from self._backlog_steps(queue)
            if self.dead:
                yield from dead_steps(self, queue)
            yield from gather_steps(self, queue)

    def _reclaim(self, queue: str, consumer: str) -> int:
        if self.dry:
            count = self.client.hlen(self.store.keys(queue).unacked(consumer))
        else:
            count = self.store.reclaim(queue, consumer)
        self.report.count(queue, "unacked", "ready", count)
        return int(count)

    def _backlog_steps(self, queue: str) -> Iterator[int]:
        keys = self.store.keys(queue)
        for name in [*self.client.zrange(keys.partitions, 0, -1), b"waiting"]:
            key, stays = keys.delayed + name.decode(), 0
            while page := self.client.zrange(key, stays, stays + CALL_LIMIT - 1, withscores=True):
                stays += len(page) - self._hand_back(queue, page)
                yield len(page)
        if not self.dry:
            self.store.clear(queue)

    def _hand_back(self, queue: str, page: Sequence[tuple[bytes, float]]) -> int:
        """Returns how many have left their place."""
        now_ms, messages = self._now_ms(), self.store.keys(queue).messages
        records = self.client.hmget(messages, [member for member, _ in page])
        entries = []
        for (member, score), record in zip(page, records, strict=True):
            if record is None:
                continue
            reason = self._refusal(record, int(score), now_ms)
            if reason:
                self.report.leave(messages, _text(member), reason)
            else:
                entries.append(Entry(member, "", int(score), b""))
        moved = len(entries)
        if entries and not self.dry:
            ((_, moved),) = self._transaction([self._call(queue, "delayed", entries)])
        self.report.count(queue, "delayed", "ready", moved)
        return 0 if self.dry else moved

    def _refusal(self, record: bytes, due_ms: int, now_ms: int) -> str:
        try:
            envelope = open_envelope(open_kept(record).message, 0)
        except MessageError as error:
            return str(error)
        when = due(envelope.payload)
        if self.force or due_ms <= now_ms or (when and when.at_ms == due_ms):
            return ""
        return "its due time is not in an eta header, so a stock worker would run it at once"


def _text(name: bytes) -> str:
    return name.decode(errors="replace")


_DIRECTIONS: Mapping[str, Any] = {"to-delayed": ToDelayed, "to-stock": ToStock}


def plan(channel: Channel, direction: Direction, **options: Any) -> Report:
    """What a migration would move, with the reasons why it would be refused. Changes nothing.

    `options` are those of `to_delayed` or `to_stock`.
    """
    migration: Migration = _DIRECTIONS[direction](channel, dry=True, **options)
    migration.report.blockers = migration.blockers()
    return migration.run()


def to_delayed(
    channel: Channel,
    *,
    queues: Iterable[str] = (),
    older_than_seconds: float | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Take over what stock workers held for `older_than_seconds`, and ETA messages that are ready.

    `older_than_seconds` is the stock transport's `visibility_timeout` unless told otherwise.
    Twice is safe. Raises MigrationRefused where stock workers still run, unless `force`.
    """
    migration = ToDelayed(channel, queues, older_than_seconds=older_than_seconds)
    return _checked(migration, force).run(progress)


def to_stock(
    channel: Channel,
    *,
    queues: Iterable[str] = (),
    force: bool = False,
    dead: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Make the whole backlog ready, for stock workers, which hold what is not due yet.

    `dead` makes dead letters ready as well, but for those on which a stock worker would stop. Twice
    is safe. `force` also moves what a stock worker would run too early, or drop. Raises
    MigrationRefused where consumers on this transport still run, unless `force`.
    """
    return _checked(ToStock(channel, queues, force=force, dead=dead), force).run(progress)


def _checked(migration: Migration, force: bool) -> Migration:
    migration.report.blockers = migration.blockers()
    if migration.report.blockers and not force:
        raise MigrationRefused("; ".join(migration.report.blockers))
    return migration


@contextmanager
def open_channel(url: str, **transport_options: Any) -> Iterator[Channel]:
    """A channel on a server, given the URL of either transport."""
    url = url if url.startswith("delayed+") else f"delayed+{url}"
    with Connection(url, transport_options=transport_options) as connection:
        connection.connect()
        yield connection.channel()
