"""What can happen to messages, one short method a move; the only module that talks to Redis."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from redis import Redis

from . import burials
from .keys import SEPARATOR, QueueKeys, step_char
from .scripts import Script, script
from .shards import Shards
from .wire import Wire

T = TypeVar("T")

DEFAULT_PARTITION_SIZE = 128

#: Messages in one call of a script: a call stays below a few milliseconds, and below Lua's stack.
CALL_LIMIT = 250

#: Tags of a consumer's messages that one call sorts.
SORT_LIMIT = 1_000

#: How long after its start a server does not call a consumer dead, at the most.
LONGEST_GRACE_MS = 15_000

#: Delayed messages that one call drops.
PURGE_LIMIT = 5_000


class UniqueOutcome(NamedTuple):
    """What became of a message with a unique key, and of the one that was delayed with that key.

    `done` is "stored", "refused", "replaced" or "pushed", `other` the other one's name in the
    backlog, or "". `state` is what the message is now: "delayed", "ready", or "already" where it
    was not stored. It is, or was to be, due at `due_ms`. `replaced` is the record of the one whose
    place it took, or empty.
    """

    done: str
    other: str
    state: str
    due_ms: int
    replaced: bytes


#: Called with queue, id and outcome when this process has sent a message with a unique key.
unique_listeners: list[Callable[[str, str, UniqueOutcome], None]] = []


class Scheduled(NamedTuple):
    """How many messages went where: into the backlog, to ready at once, or were there already."""

    delayed: int
    ready: int
    already: int


class Size(NamedTuple):
    """A queue's messages by state; `due` are those of `delayed` whose time has come."""

    ready: int
    due: int
    delayed: int


class Limits(NamedTuple):
    """When a message counts as poison (0: never), and how many dead letters are kept how long."""

    max_deliveries: int = 20
    dead_limit: int = 100_000
    dead_seconds: float = 90 * 86_400


@dataclass(frozen=True)
class DeadLetter:
    """A message that was buried. `message` is its JSON text as it was delivered."""

    id: str
    message: bytes
    reason: str
    consumer: str
    at_ms: int
    deliveries: int


@dataclass(frozen=True)
class Delivered:
    """The answer of a deliver: records (priority step + message) and when to come back.

    `next_due_ms` is 0 unless this consumer is the one that shall claim then.
    """

    now_ms: int
    next_due_ms: int
    more: bool
    consumers: int
    records: Sequence[bytes]


@dataclass(frozen=True)
class Entry:
    """One message on its way into a queue.

    `due` is milliseconds since the epoch, or `+` and milliseconds from the server's now.
    """

    id: str
    step: int
    message: str
    due: str = ""

    @property
    def record(self) -> str:
        """The form in which Redis keeps it."""
        return step_char(self.step) + self.message


class Store:
    """The moves of the messages of one Redis database. A queue is one shard: see `shards`.

    `now` is "" for the server's clock, `+ms` for that clock set forward, or a time in milliseconds
    since the epoch; tests move it. About `event_limit` lifecycle events are kept of each queue; 0:
    none are written.
    """

    def __init__(
        self,
        client: Redis,
        *,
        prefix: str = "",
        priority_steps: Iterable[int] = (0, 3, 6, 9),
        separator: str = SEPARATOR,
        partition_size: int = DEFAULT_PARTITION_SIZE,
        limits: Limits | None = None,
        event_limit: int = 0,
        shards: int | Mapping[str, int] = 1,
        now: str = "",
    ) -> None:
        self.client = client
        self.run = Wire(client.connection_pool)
        self.shards = Shards(self.run, prefix, shards)
        self.partition_size = partition_size
        self.limits = limits or Limits()
        self.event_limit = event_limit
        self.now = now
        #: The connection over which acks are known to work: a server may have lost its scripts.
        self._acks_over: int | None = None
        steps = tuple(sorted(priority_steps))
        self.keys = lru_cache(maxsize=4096)(
            lambda queue: QueueKeys(queue, prefix, steps, separator)
        )

    def over(self, client: Redis) -> Store:
        """The same store over other connections."""
        other = copy(self)
        other.client, other.run = client, Wire(client.connection_pool)
        return other

    def schedule(self, queue: str, entries: Sequence[Entry], expires_ms: int = 0) -> Scheduled:
        """Keep messages until they are due. The same message with the same id is kept once."""
        counts = [0, 0, 0]
        for chunk in chunks(entries):
            move, given = self.schedule_call(queue, chunk, expires_ms)
            counts = [a + b for a, b in zip(counts, move(self.run, **given), strict=True)]
        return Scheduled(*counts)

    def schedule_call(
        self, queue: str, entries: Sequence[Entry], expires_ms: int = 0
    ) -> tuple[Script, dict[str, Any]]:
        """The script that schedules and its arguments, for who sends it in a pipeline."""
        keys = self.keys(queue)
        return script("schedule"), {
            **self.backlog_keys(keys),
            **self.event_keys(keys),
            "ready": keys.ready,
            "now": self.now,
            "partition_size": self.partition_size,
            "steps": keys.steps,
            "expires_ms": expires_ms,
            "entries": [part for e in entries for part in (e.id, e.due, e.record)],
        }

    def schedule_unique(
        self, queue: str, entry: Entry, key: str, conflict: str, expires_ms: int = 0
    ) -> tuple[str, str]:
        """Schedule a message unless another one with this key is delayed.

        `conflict` says what then: "refuse", "replace" or "debounce"; "retry" schedules it all the
        same, and refuses none because of it. Returns what was done ("stored", "refused", "replaced"
        or "pushed") and the id of the other one, or "".
        """
        keys = self.keys(queue)
        done, other, state, due_ms, replaced = script("unique")(
            self.run,
            **self.backlog_keys(keys),
            **self.event_keys(keys),
            unique=keys.unique,
            unique_due=keys.unique_due,
            ready=keys.ready,
            now=self.now,
            partition_size=self.partition_size,
            steps=keys.steps,
            expires_ms=expires_ms,
            conflict=conflict,
            key=key,
            id=entry.id,
            due=entry.due or "0",
            record=entry.record,
        )
        outcome = UniqueOutcome(
            done.decode(),
            other.decode(errors="surrogateescape"),
            state.decode(),
            int(due_ms),
            replaced,
        )
        for listener in unique_listeners:
            listener(queue, entry.id, outcome)
        return outcome.done, outcome.other

    def publish(self, queue: str, entries: Sequence[Entry], expires_ms: int = 0) -> int:
        """Make messages ready at once."""
        count = 0
        for chunk in chunks(entries):
            move, given = self.publish_call(queue, chunk, expires_ms)
            count += move(self.run, **given)
        return count

    def publish_call(
        self, queue: str, entries: Sequence[Entry], expires_ms: int = 0
    ) -> tuple[Script, dict[str, Any]]:
        """The script that publishes and its arguments, for who sends it in a pipeline."""
        keys = self.keys(queue)
        return script("publish"), {
            "wake": keys.wake,
            "ready": keys.ready,
            "steps": keys.steps,
            "expires_ms": expires_ms,
            "records": [entry.record for entry in entries],
        }

    def restore_call(
        self, queue: str, entries: Sequence[tuple[bytes, ...]]
    ) -> tuple[Script, dict[str, Any]]:
        """The script that restores messages, given as (member, record), and its arguments."""
        keys = self.keys(queue)
        return script("restore"), {
            **self.backlog_keys(keys),
            **self.event_keys(keys),
            "unique": keys.unique,
            "unique_due": keys.unique_due,
            "job": keys.job(""),
            "partition_size": self.partition_size,
            "now": self.now,
            "run": "",
            "ledger_seconds": 0,
            "entries": [part for entry in entries for part in entry],
        }

    def deliver(
        self,
        queue: str,
        consumer: str,
        want: int,
        tag: int,
        *,
        lease_ms: int,
        leased: bool = False,
        waits: bool = True,
        promotions: int = CALL_LIMIT,
        expires_ms: int = 0,
    ) -> Delivered | None:
        """Promote what is due and hand out up to `want` messages under tags from `tag` upwards.

        None: the caller believed to be `leased`, and is not. `lease_ms` 0 takes messages for good.
        """
        keys = self.keys(queue)
        answer = script("deliver")(
            self.run,
            **self._holding(keys, consumer),
            **self.event_keys(keys),
            now=self.now,
            consumer=consumer,
            leased=int(leased),
            lease_ms=lease_ms,
            want=want,
            tag=tag,
            promotions=promotions,
            waits=int(waits),
            expires_ms=expires_ms,
            steps=keys.steps,
        )
        if len(answer) == 1:
            return None
        now_ms, next_due_ms, more, consumers, *records = answer
        return Delivered(now_ms, next_due_ms, bool(more), consumers, records)

    def recover(self, queue: str, consumer: str, seen_tag: int) -> list[tuple[int, bytes]]:
        """Messages that were handed to `consumer` in an answer that never arrived."""
        unacked, cursor = self.keys(queue).unacked(consumer), b"0"
        found: dict[int, bytes] = {}
        while True:
            cursor, *page = script("recover")(
                self.run, unacked=unacked, seen_tag=seen_tag, cursor=cursor, count=CALL_LIMIT
            )
            found.update(zip(map(int, page[::2]), page[1::2], strict=True))
            if int(cursor) == 0:
                return sorted(found.items())

    def ack(
        self, queue: str, consumer: str, tags: Sequence[int], on_error: Callable[[], None]
    ) -> None:
        """Forget messages for good. What is not held stays as it is, so that twice is safe.

        It does not wait: `on_error` is called later where the server did not do it.
        """
        keys = self.keys(queue)
        if not self.event_limit:
            self.run.post("HDEL", keys.unacked(consumer), *tags, on_error=on_error)
            return
        move = script("ack")
        given = {
            "unacked": keys.unacked(consumer),
            **self.event_keys(keys),
            "consumer": consumer,
            "tags": tags,
        }
        if self._acks_over != (generation := self.run.generation):
            move(self.run, **given)
            self._acks_over = generation
            return

        def failed() -> None:
            self._acks_over = None
            on_error()

        self.run.post("EVALSHA", move.sha, *move.pack(given), on_error=failed)

    def release(
        self, queue: str, consumer: str, tags: Iterable[int], *, counted: bool = False
    ) -> int:
        """Put held messages back to the heads of their lists; `counted` as a failed attempt."""
        keys = self.keys(queue)
        total = 0
        for part in chunks(sorted(tags, reverse=True)):
            count, *buried = script("release")(
                self.run,
                wake=keys.wake,
                unacked=keys.unacked(consumer),
                held=keys.held(consumer),
                **self._dead(keys),
                **self.event_keys(keys),
                ready=keys.ready,
                now=self.now,
                consumer=consumer,
                steps=keys.steps,
                counted=int(counted),
                max_deliveries=self.limits.max_deliveries,
                **self._dead_bounds(),
                tags=part,
            )
            total += count
            self._tell_of_burials(queue, buried)
        return total

    def _tell_of_burials(self, queue: str, ids: Sequence[bytes]) -> None:
        burials.tell(self, queue, [id.decode(errors="surrogateescape") for id in ids])

    def leave(self, queue: str, consumer: str) -> None:
        """Release all that `consumer` holds, pass its promise on and end its lease."""
        keys = self.keys(queue)
        self._sort_held(keys, consumer)
        left = 1
        while left:
            left = script("leave")(
                self.run,
                **self._holding(keys, consumer),
                **self.event_keys(keys),
                held=keys.held(consumer),
                consumer=consumer,
                steps=keys.steps,
                limit=CALL_LIMIT,
            )

    def _sort_held(self, keys: QueueKeys, consumer: str) -> None:
        """Sort what one call cannot: a consumer without a prefetch limit may hold any number."""
        if self.run("HLEN", keys.unacked(consumer)) <= SORT_LIMIT:
            return
        cursor = b"0"
        while True:
            cursor = script("sort_held")(
                self.run,
                unacked=keys.unacked(consumer),
                held=keys.held(consumer),
                cursor=cursor,
                count=SORT_LIMIT,
            )
            if int(cursor) == 0:
                return

    def consumers(self, queue: str) -> list[tuple[str, int, int]]:
        """Who consumes: name, ms until its lease ends, unacked messages; who ends first leads."""
        keys = self.keys(queue)
        found = script("consumers")(self.run, consumers=keys.consumers, now=self.now)
        names = [name.decode() for name in found[::2]]
        return [
            (name, int(left_ms), self.run("HLEN", keys.unacked(name)))
            for name, left_ms in zip(names, found[1::2], strict=True)
        ]

    def renew(self, queue: str, consumer: str, lease_ms: int) -> list[str] | None:
        """Make the lease last. Returns consumers whose lease has ended; None: this one's has.

        A server that has just started names none: they had no chance to renew.
        """
        lasts, *dead = script("renew")(
            self.run,
            consumers=self.keys(queue).consumers,
            now=self.now,
            consumer=consumer,
            lease_ms=lease_ms,
            grace_ms=min(lease_ms, LONGEST_GRACE_MS),
        )
        return [name.decode() for name in dead] if lasts else None

    def soonest_end_ms(self, queue: str, consumer: str) -> int | None:
        """How many ms until the first lease of another consumer ends; None: there is none."""
        found = script("consumers")(self.run, consumers=self.keys(queue).consumers, now=self.now)
        each = zip(found[::2], map(int, found[1::2]), strict=True)
        others = (ms for name, ms in each if name.decode() != consumer)
        return min((ms for ms in others if ms > 0), default=None)

    def reclaim(self, queue: str, consumer: str) -> int:
        """Put back the messages of a consumer whose lease has ended; returns how many."""
        keys = self.keys(queue)
        self._sort_held(keys, consumer)
        total, left = 0, 1
        while left:
            returned, left, *buried = script("reclaim")(
                self.run,
                **self._holding(keys, consumer),
                **self.event_keys(keys),
                held=keys.held(consumer),
                **self._dead(keys),
                now=self.now,
                consumer=consumer,
                steps=keys.steps,
                limit=CALL_LIMIT,
                max_deliveries=self.limits.max_deliveries,
                **self._dead_bounds(),
            )
            total += returned
            self._tell_of_burials(queue, buried)
        return total

    def park(self, queue: str, consumer: str, entries: Sequence[tuple[int, str, int]]) -> int:
        """Move held messages, given as (tag, id, due_ms), to the backlog."""
        keys = self.keys(queue)
        return script("park")(
            self.run,
            **self.backlog_keys(keys),
            **self.event_keys(keys),
            unacked=keys.unacked(consumer),
            consumer=consumer,
            partition_size=self.partition_size,
            entries=[part for entry in entries for part in entry],
        )

    def bury(
        self, queue: str, consumer: str, entries: Sequence[tuple[int, str, str, bytes]]
    ) -> int:
        """Move messages, given as (tag, id, reason, record), to the dead letters.

        An empty record stands for the one that is held under the tag.
        """
        keys = self.keys(queue)
        buried = script("bury")(
            self.run,
            unacked=keys.unacked(consumer),
            **self._dead(keys),
            **self.event_keys(keys),
            now=self.now,
            consumer=consumer,
            **self._dead_bounds(),
            entries=[part for entry in entries for part in entry],
        )
        self._tell_of_burials(queue, buried)
        return len(buried)

    def dead_count(self, queue: str) -> int:
        """How many dead letters a queue has."""
        return self.run("ZCARD", self.keys(queue).dead)

    def dead_ids(self, queue: str, start: int = 0, count: int = 100) -> list[str]:
        """A page of the ids of a queue's dead letters, the oldest first."""
        found = self.run("ZRANGE", self.keys(queue).dead, start, start + count - 1)
        return [id.decode(errors="surrogateescape") for id in found]

    def dead_letters(self, queue: str, ids: Sequence[str]) -> list[DeadLetter]:
        """The dead letters with these ids, without those that are there no more."""
        if not ids:
            return []
        keys = self.keys(queue)
        raw = [id.encode(errors="surrogateescape") for id in ids]
        records = self.run("HMGET", keys.dead_messages, *raw)
        notes = self.run("HMGET", keys.dead_reasons, *raw)
        return [
            DeadLetter(id, record[1:], **json.loads(note))
            for id, record, note in zip(ids, records, notes, strict=True)
            if record is not None and note is not None
        ]

    def replay(self, queue: str, ids: Sequence[str], due_ms: int = 0) -> int:
        """Give dead letters another try, now or at a time; returns how many there were."""
        keys = self.keys(queue)
        return sum(
            script("replay")(
                self.run,
                **self.backlog_keys(keys),
                **self._dead(keys),
                **self.event_keys(keys),
                ready=keys.ready,
                due_ms=due_ms,
                partition_size=self.partition_size,
                steps=keys.steps,
                ids=part,
            )
            for part in chunks(ids)
        )

    def purge_dead(self, queue: str, ids: Sequence[str]) -> int:
        """Drop dead letters for good; returns how many there were."""
        keys = self.keys(queue)
        return sum(script("forget")(self.run, **self._dead(keys), ids=part) for part in chunks(ids))

    def size(self, queue: str) -> Size:
        """Count a queue's messages by state."""
        keys = self.keys(queue)
        return Size(
            *script("size")(
                self.run,
                partitions=keys.partitions,
                delayed=keys.delayed,
                messages=keys.messages,
                ready=keys.ready,
                now=self.now,
            )
        )

    def purge(self, queue: str) -> int:
        """Drop what is ready and what is delayed; returns how many messages that was."""
        keys = self.keys(queue)
        total, gone = 0, 1
        while gone:
            gone = script("purge")(
                self.run, **self.backlog_keys(keys), ready=keys.ready, limit=PURGE_LIMIT
            )
            total += gone
        return total

    def delete(self, queue: str) -> int:
        """Purge a queue and forget it; returns how many messages that was."""
        keys = self.keys(queue)
        count = self.purge(queue)
        script("delete")(
            self.run,
            partitions=keys.partitions,
            wake=keys.wake,
            armed=keys.armed,
            events=keys.events,
            ready=keys.ready,
        )
        return count

    def announce(self, queue: str) -> None:
        """Put wake tokens for all that can be claimed, now or later."""
        keys = self.keys(queue)
        script("announce")(
            self.run,
            **self.backlog_keys(keys),
            armed=keys.armed,
            ready=keys.ready,
            steps=keys.steps,
        )

    def backlog_keys(self, keys: QueueKeys) -> dict[str, Any]:
        return {
            "partitions": keys.partitions,
            "delayed": keys.delayed,
            "messages": keys.messages,
            "duplicates": keys.duplicates,
            "wake": keys.wake,
        }

    def event_keys(self, keys: QueueKeys) -> dict[str, Any]:
        return {"events": keys.events, "event_limit": self.event_limit}

    def _holding(self, keys: QueueKeys, consumer: str) -> dict[str, Any]:
        return {
            **self.backlog_keys(keys),
            "armed": keys.armed,
            "consumers": keys.consumers,
            "unacked": keys.unacked(consumer),
            "ready": keys.ready,
        }

    def _dead(self, keys: QueueKeys) -> dict[str, Any]:
        return {
            "dead": keys.dead,
            "dead_messages": keys.dead_messages,
            "dead_reasons": keys.dead_reasons,
        }

    def _dead_bounds(self) -> dict[str, Any]:
        return {
            "dead_limit": self.limits.dead_limit,
            "dead_age_ms": int(self.limits.dead_seconds * 1000),
        }


def chunks(entries: Sequence[T], limit: int | None = None) -> Iterable[Sequence[T]]:
    size = limit or CALL_LIMIT
    return (entries[at : at + size] for at in range(0, len(entries), size))
