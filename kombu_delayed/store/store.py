"""What can happen to messages, one short method a move; the only module that talks to Redis."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from ..connection.connection import Replicas, Wire, numbers, pairs
from ..connection.format import Format
from ..errors import NodeDown
from ..message.ticket import Gate
from ..message.wait import NO_WAIT, Wait
from . import dead_letter_listeners, instrumentation
from .event_trimming import Upkeep
from .keys import SEPARATOR, QueueKeys, step_char
from .queue_metrics import SPANS_MS, Metrics
from .renewal import Renewal, merged
from .scripts import Call, Script, script, send_together
from .shards import Shards

T = TypeVar("T")

DEFAULT_PARTITION_SIZE = 128

#: Messages in one call of a script: a call stays below a few milliseconds, and below Lua's stack.
CALL_LIMIT = 250

#: Tags of a consumer's messages that one call sorts.
SORT_LIMIT = 1_000

#: Delayed messages that one call drops.
PURGE_LIMIT = 5_000

#: Partitions in which `Store.metrics` counts what is due.
METRICS_LIMIT = 1_000


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
    #: The attempts that have failed, as whoever buried it has written them.
    failures: str = ""


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
    #: Whether messages wait at a gate, where the caller goes by none.
    gated: bool = False


class Entry(NamedTuple):
    """One message on its way into a queue.

    `due` is milliseconds since the epoch, or `+` and milliseconds from the server's now.
    """

    id: str
    step: int
    message: str
    due: str = ""

    @property
    def record(self) -> str:
        """The form in which Redis keeps it, but in the backlog."""
        return step_char(self.step) + self.message

    @property
    def kept(self) -> str:
        """The form in which the backlog keeps it, as far as the due time is known."""
        due = "" if self.due.startswith("+") else self.due
        return f"{step_char(self.step)}{due}{self.message}"


class Store:
    """The moves of the messages of one Redis database. A queue is one shard: see `shards`.

    `now` is "" for the server's clock, `+ms` for that clock set forward, or a time in milliseconds
    since the epoch; tests move it. About `event_limit` lifecycle events are kept of each queue; 0:
    none are written. What sends messages waits for `replicas`, and raises NotReplicated where too
    few have them in time. With a `format`, it raises FormatError for data of a newer one.
    """

    #: Queues that one call renews: all their keys have to be in one slot of a Cluster.
    renewals_at_once = 250

    #: Whether also the ready lists carry the hash tag of their queue.
    tagged = False

    #: Of so many queues one command can tell.
    look_limit = 100

    def __init__(
        self,
        client: Any,
        *,
        prefix: str = "",
        priority_steps: Iterable[int] = (0, 3, 6, 9),
        separator: str = SEPARATOR,
        partition_size: int = DEFAULT_PARTITION_SIZE,
        limits: Limits | None = None,
        event_limit: int = 0,
        shards: int | Mapping[str, int] = 1,
        replicas: Replicas | None = None,
        format: Format | None = None,
        now: str = "",
    ) -> None:
        self.client = client
        self.format = format
        self.run = self._wire(client)
        self.shards = self._new_shards(prefix, shards)
        self.replicas = replicas
        self.partition_size = partition_size
        self.limits = limits or Limits()
        self.event_limit = event_limit
        self._upkeep = Upkeep()
        self.now = now
        #: Where scripts are known to work that nobody waits for: a server may have lost them.
        self._posted_over: dict[tuple[Wire, str], int] = {}
        steps = tuple(sorted(priority_steps))
        self.keys = lru_cache(maxsize=1024)(
            lambda queue: QueueKeys(queue, prefix, steps, separator, self._hash_tag(queue))
        )
        self._known = lru_cache(maxsize=4096)(self._find_known)

    def _find_known(
        self,
        name: str,
        queue: str,
        owner: str | None,
        now: str,
        partition_size: int,
        limits: Limits,
    ) -> dict[str, Any]:
        keys, takes = self.keys(queue), script(name)
        known = {
            **takes.keys_among(keys, owner),
            "steps": keys.steps,
            "now": now,
            "partition_size": partition_size,
            "event_limit": 0,
            "max_deliveries": limits.max_deliveries,
            "dead_limit": limits.dead_limit,
            "dead_age_ms": int(limits.dead_seconds * 1000),
        }
        if owner is not None:
            known["consumer"] = owner
        return {name: value for name, value in known.items() if name in takes.names}

    def over(self, client: Any) -> Store:
        """The same store over other connections."""
        other = copy(self)
        other.client, other.run = client, self._wire(client)
        other._posted_over = {}
        return other

    def hang_up(self) -> None:
        """Close its connections; what needs one opens it again."""
        self.client.connection_pool.disconnect()

    def _wire(self, client: Any) -> Wire:
        return Wire(client.connection_pool, self.format)

    def _hash_tag(self, queue: str) -> str:
        """What is in braces in all keys of a queue; "" where that is its name, and not in all."""
        return ""

    def queue_with(self, tag: str) -> str:
        """The queue whose keys have this in braces."""
        return tag

    def _new_shards(self, prefix: str, configured: int | Mapping[str, int]) -> Shards:
        return Shards(self.run, prefix, configured)

    def send(self, *command: Any) -> Any:
        """What sends messages: it waits for replicas, and for a slot that moves."""
        return self.run.insist(*command, replicas=self.replicas)

    def call(self, name: str, queue: str, owner: str | None = None, /, **given: Any) -> Call:
        """A script and all that it takes: what is given, and what is known by the same names.

        Known are the keys of the queue and what this store was made with. `owner` is the consumer
        or the job that some of the keys are of.
        """
        known = self._known(name, queue, owner, self.now, self.partition_size, self.limits)
        if self.event_limit and "event_limit" in known:
            given["event_limit"] = self._upkeep.bound(known["events"], self.event_limit)
        return script(name), {**known, **given}

    def ask(self, name: str, queue: str, owner: str | None = None, /, **given: Any) -> Any:
        """Run a script, with what it takes as in `call`."""
        move, all_given = self.call(name, queue, owner, **given)
        return move(self.run, **all_given)

    def schedule(self, queue: str, entries: Sequence[Entry], expires_ms: int = 0) -> Scheduled:
        """Keep messages until they are due. The same message with the same id is kept once."""
        counts = [0, 0, 0]
        for chunk in chunks(entries):
            move, given = self.schedule_call(queue, chunk, expires_ms)
            found = numbers(move(self.send, **given))
            counts = [a + b for a, b in zip(counts, found, strict=True)]
        if counts[0] and (told := instrumentation.current) is not None:
            told.scheduled(queue, counts[0])
        return Scheduled(*counts)

    def schedule_call(self, queue: str, entries: Sequence[Entry], expires_ms: int = 0) -> Call:
        """The script that schedules and its arguments, for who sends it in a pipeline."""
        given = [part for e in entries for part in (e.id, e.due, e.kept)]
        return self.call("schedule", queue, expires_ms=expires_ms, entries=given)

    def schedule_unique(
        self, queue: str, entry: Entry, key: str, conflict: str, expires_ms: int = 0
    ) -> tuple[str, str]:
        """Schedule a message unless another one with this key is delayed.

        `conflict` says what then: "refuse", "replace" or "debounce"; "retry" schedules it all the
        same, and refuses none because of it. Returns what was done ("stored", "refused", "replaced"
        or "pushed") and the id of the other one, or "".
        """
        move, given = self.call(
            "unique",
            queue,
            expires_ms=expires_ms,
            conflict=conflict,
            key=key,
            id=entry.id,
            due=entry.due or "0",
            record=entry.record,
        )
        done, other, state, due_ms, replaced = move(self.send, **given)
        outcome = UniqueOutcome(
            done.decode(),
            other.decode(errors="surrogateescape"),
            state.decode(),
            int(due_ms),
            replaced,
        )
        if outcome.state == "delayed" and (told := instrumentation.current) is not None:
            told.scheduled(queue, 1)
        for listener in unique_listeners:
            listener(queue, entry.id, outcome)
        return outcome.done, outcome.other

    def publish(self, queue: str, entries: Sequence[Entry], expires_ms: int = 0) -> int:
        """Make messages ready at once."""
        count = 0
        for chunk in chunks(entries):
            move, given = self.publish_call(queue, chunk, expires_ms)
            count += move(self.send, **given)
        return count

    def publish_call(self, queue: str, entries: Sequence[Entry], expires_ms: int = 0) -> Call:
        """The script that publishes and its arguments, for who sends it in a pipeline."""
        records = [entry.record for entry in entries]
        return self.call("publish", queue, expires_ms=expires_ms, records=records)

    def cancel_call(self, queue: str, ids: Sequence[str], how: str = "all") -> Call:
        """The script that cancels and its arguments, for who sends it in a pipeline."""
        return self.call("cancel", queue, how=how, ids=ids)

    def restore_call(self, queue: str, entries: Sequence[tuple[bytes, ...]]) -> Call:
        """The script that restores messages, given as (member, record), and its arguments."""
        parts = [part for entry in entries for part in entry]
        return self.call("restore", queue, "", run="", ledger_seconds=0, entries=parts)

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
        listens: bool = False,
        promotions: int = CALL_LIMIT,
        expires_ms: int = 0,
        gate: Gate | None = None,
    ) -> Delivered | None:
        """Promote what is due and hand out up to `want` messages under tags from `tag` upwards.

        None: the caller believed to be `leased`, and is not. `lease_ms` 0 takes messages for good.
        Who `listens` is sent wake tokens, once nothing is left for it. With a `gate`, those are
        handed out whose turn it is, and besides what has no ticket of it: see `admit`.
        """
        move, given = self.deliver_call(
            queue,
            consumer,
            want,
            tag,
            lease_ms=lease_ms,
            leased=leased,
            waits=waits,
            listens=listens,
            promotions=promotions,
            expires_ms=expires_ms,
            gate=gate,
        )
        return delivered(move(self.run, **given), gate)

    def deliver_call(
        self,
        queue: str,
        consumer: str,
        want: int,
        tag: int,
        *,
        lease_ms: int,
        leased: bool = False,
        waits: bool = True,
        listens: bool = False,
        promotions: int = CALL_LIMIT,
        expires_ms: int = 0,
        gate: Gate | None = None,
    ) -> Call:
        """The script that delivers and its arguments; `delivered` reads its answer."""
        gated = {} if gate is None else {"version": gate.version, "limits": gate.numbers}
        return self.call(
            "deliver" if gate is None else "deliver_gated",
            queue,
            consumer,
            leased=int(leased),
            lease_ms=lease_ms,
            want=want,
            tag=tag,
            promotions=promotions,
            waits=2 if listens else int(waits),
            expires_ms=expires_ms,
            **gated,
        )

    def count_keys(
        self, parts: Sequence[Sequence[tuple[str, bool]]], counted: Sequence[str]
    ) -> tuple[list[int], list[int]]:
        """How many keys say that there are messages in queues, and how many consumers some have.

        Of each queue in a part what is ready or waits at a gate counts, and its backlog if True.
        """
        commands = [("EXISTS", *self._signs(part)) for part in parts]
        commands += [("ZCARD", self.keys(queue).consumers) for queue in counted]
        answers = without_errors(self.run.many(commands))
        return answers[: len(parts)], answers[len(parts) :]

    def _signs(self, part: Sequence[tuple[str, bool]]) -> Iterator[str]:
        for queue, with_backlog in part:
            keys = self.keys(queue)
            yield from keys.ready
            yield keys.waiting
            if with_backlog:
                yield keys.partitions

    def look(self, parts: Sequence[Sequence[str]]) -> list[list[int]]:
        """For each queue of each part 0 where there is something to claim, or -1 for nothing.

        Else in how many ms its next message is due, for which a consumer has promised to come.
        """
        return [*map(numbers, self._all_of(map(self._look_call, parts)))]

    def _look_call(self, queues: Sequence[str]) -> Call:
        keys = [*map(self.keys, queues)]
        names = [name for q in keys for name in (q.partitions, q.delayed, q.armed, *q.ready)]
        return self.call("look", queues[0], queues=names, lists=len(keys[0].ready))

    def together(self, calls: Sequence[Call]) -> list[Any]:
        """Run scripts of many queues in one go; where one was refused, its error is its answer."""
        return send_together(self.run.many, calls)

    def _all_of(self, calls: Iterable[Call]) -> list[Any]:
        """As `together`. Raises the first error."""
        return without_errors(self.together([*calls]))

    def admit(
        self, queue: str, consumer: str, entries: Sequence[tuple[int, str, bytes]], gate: Gate
    ) -> int:
        """Let held messages, given as (tag, ticket, record), wait for their turn; returns how many.

        An empty record stands for the one that is held under the tag. The tickets are of the gate.
        """
        parts = [part for entry in entries for part in entry]
        return self.ask("admit", queue, consumer, limits=gate.numbers, entries=parts)

    def free(
        self, queue: str, consumer: str, tags: Sequence[int], on_error: Callable[[], None]
    ) -> None:
        """Give back the slots of messages whose tasks have ended. Twice is safe.

        It does not wait: `on_error` is called later where the server did not do it.
        """
        self._post(*self.call("free", queue, consumer, tags=tags), on_error)

    def waiting(self, queue: str) -> int:
        """How many messages wait at the gate of a queue."""
        count: int = self.run("ZCARD", self.keys(queue).waiting)
        return count

    def running(self, queue: str) -> dict[str, int]:
        """The slots in use in a queue, by limit and key as tickets name them."""
        found = self.run("HGETALL", self.keys(queue).gate + "slots")
        return {name.decode(): int(count) for name, count in pairs(found)}

    def recover(self, queue: str, consumer: str, seen_tag: int) -> list[tuple[int, bytes]]:
        """Messages that were handed to `consumer` in an answer that never arrived."""
        cursor = b"0"
        found: dict[int, bytes] = {}
        while True:
            move, given = self._recover_call(queue, consumer, seen_tag, cursor)
            cursor, *page = move(self.run, **given)
            found.update(zip(map(int, page[::2]), page[1::2], strict=True))
            if int(cursor) == 0:
                return sorted(found.items())

    def _recover_call(self, queue: str, consumer: str, seen_tag: int, cursor: bytes) -> Call:
        given = {"seen_tag": seen_tag, "cursor": cursor, "count": CALL_LIMIT}
        return self.call("recover", queue, consumer, **given)

    def recover_all(
        self, seen_tags: Mapping[str, int], consumer: str
    ) -> dict[str, list[tuple[int, bytes]]]:
        """As `recover` of each queue in few round trips, each with the last tag that did arrive."""
        calls = [self._recover_call(queue, consumer, tag, b"0") for queue, tag in seen_tags.items()]
        found = {}
        for queue, answer in zip(tuple(seen_tags), self.together(calls), strict=True):
            if isinstance(answer, list) and int(answer[0]) == 0:
                found[queue] = sorted(zip(map(int, answer[1::2]), answer[2::2], strict=True))
            else:
                found[queue] = self.recover(queue, consumer, seen_tags[queue])
        return found

    def ack(
        self,
        queue: str,
        consumer: str,
        tags: Sequence[int],
        on_error: Callable[[], None],
        freed: Sequence[int] = (),
    ) -> None:
        """Forget messages for good. What is not held stays as it is, so that twice is safe.

        The slots of those that are `freed` come back with it, as by `free`. It does not wait:
        `on_error` is called later where the server did not do it.
        """
        if freed:
            given = {"freed": " ".join(map(str, freed)), "tags": tags}
            self._post(*self.call("ack_gated", queue, consumer, **given), on_error)
        elif self.event_limit:
            self._post(*self.call("ack", queue, consumer, tags=tags), on_error)
        else:
            self.run.post("HDEL", self.keys(queue).unacked(consumer), *tags, on_error=on_error)

    def _post(self, move: Script, given: dict[str, Any], on_error: Callable[[], None]) -> None:
        """Send a script and do not wait for its answer, over connections that are known to work."""
        command = ("EVALSHA", move.sha, *move.pack(given))
        wire = self.run.to(command)
        known = wire, move.name
        if self._posted_over.get(known) != (generation := wire.generation):
            move(self.run, **given)
            self._posted_over[known] = generation
            return

        def failed() -> None:
            self._posted_over.pop(known, None)
            on_error()

        wire.post(*command, on_error=failed)

    def release(
        self,
        queue: str,
        consumer: str,
        tags: Iterable[int],
        *,
        counted: bool = False,
        behind: bool = False,
    ) -> int:
        """Put held messages back to the heads of their lists; `counted` as a failed attempt.

        `behind` puts them behind what waits, in the order given.
        """
        total, how = 0, {"counted": int(counted), "behind": int(behind)}
        for part in chunks([*tags] if behind else sorted(tags, reverse=True)):
            count, *buried = self.ask("release", queue, consumer, **how, tags=part)
            total += count
            self._tell_of_burials(queue, buried)
        return total

    def _tell_of_burials(self, queue: str, ids: Sequence[bytes]) -> None:
        if ids and (told := instrumentation.current) is not None:
            told.buried(queue, len(ids))
        dead_letter_listeners.tell(self, queue, [id.decode(errors="surrogateescape") for id in ids])

    def leave(self, queue: str, consumer: str, running: Collection[int] = ()) -> None:
        """Release all that `consumer` holds, pass its promise on and end its lease.

        While there are slots of `running` messages, given by their tags, these and the lease stay.
        """
        self._sort_held(queue, consumer)
        move, given = self._leave_call(queue, consumer, running)
        while move(self.run, **given):
            pass

    def _leave_call(self, queue: str, consumer: str, running: Collection[int]) -> Call:
        return self.call("leave", queue, consumer, limit=CALL_LIMIT, running=running)

    def leave_all(
        self, queues: Sequence[str], consumer: str, running: Callable[[str], Collection[int]]
    ) -> dict[str, BaseException]:
        """As `leave` on each queue, in few round trips; returns the errors, by queue."""
        held = self.run.many([("HLEN", self.keys(queue).unacked(consumer)) for queue in queues])
        few = [q for q, count in zip(queues, held, strict=True) if not _is_over(count, SORT_LIMIT)]
        calls = [self._leave_call(queue, consumer, running(queue)) for queue in few]
        found = dict.fromkeys(queues, 1) | dict(zip(few, self.together(calls), strict=True))
        errors: dict[str, BaseException] = {}
        for queue, left in found.items():
            if isinstance(left, BaseException):
                errors[queue] = left
            elif left:
                self.leave(queue, consumer, running(queue))
        return errors

    def _sort_held(self, queue: str, consumer: str) -> None:
        """Sort what one call cannot: a consumer without a prefetch limit may hold any number."""
        if self.run("HLEN", self.keys(queue).unacked(consumer)) <= SORT_LIMIT:
            return
        cursor = self.ask("sort_held", queue, consumer, cursor=b"0", count=SORT_LIMIT)
        while int(cursor):
            cursor = self.ask("sort_held", queue, consumer, cursor=cursor, count=SORT_LIMIT)

    def consumers(self, queue: str) -> list[tuple[str, int, int]]:
        """Who consumes: name, ms until its lease ends, unacked messages; who ends first leads.

        Bytes of a name that are no UTF-8 are surrogates, as all that takes one expects them.
        """
        keys, found = self.keys(queue), self.ask("consumers", queue)
        names = [name.decode(errors="surrogateescape") for name in found[::2]]
        return [
            (name, int(left_ms), self.run("HLEN", keys.unacked(name)))
            for name, left_ms in zip(names, found[1::2], strict=True)
        ]

    def renew(self, queue: str, consumer: str, lease_ms: int) -> list[str] | None:
        """Make the lease last in one queue; returns None where it was lost.

        Else those whose lease there is over by the server's clock, which need not be dead. Raises
        connection errors, NodeDown where the queue's node could not be asked.
        """
        renewal = self.renew_all([queue], [queue], consumer, lease_ms, lease_ms)
        if renewal.failed:
            raise NodeDown(f"the node that has queue {queue!r} cannot be asked now")
        ended = (other for other in renewal.others if other.end_ms <= renewal.now_ms)
        return None if renewal.lost else [other.consumer for other in ended]

    def renew_all(
        self,
        queues: Sequence[str],
        renewed: Collection[str],
        consumer: str,
        lease_ms: int,
        idle_ms: int,
    ) -> Renewal:
        """Look at the leases in all `queues`, and make those of `consumer` last in `renewed` ones.

        They last for `idle_ms` where it holds nothing. One round trip for many queues.
        """
        parts = [*chunks(queues, self.renewals_at_once)]
        lengths = {"lease_ms": lease_ms, "idle_ms": idle_ms}
        calls = [
            self.call(
                "renew",
                part[0],
                consumer,
                keys=self._keys_to_renew(part, consumer),
                renewed=[n for n, queue in enumerate(part, 1) if queue in renewed],
                **lengths,
            )
            for part in parts
        ]
        return merged(zip(parts, map(self._heard, self.together(calls)), strict=True))

    def _heard(self, answer: Any) -> Any:
        """What was said of some leases; None: they could not be asked. Raises what was refused."""
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _keys_to_renew(self, queues: Sequence[str], consumer: str) -> list[str]:
        keys = [self.keys(queue) for queue in queues]
        return [
            *(each.consumers for each in keys),
            *(each.unacked(consumer) for each in keys),
            *(each.slots(consumer) for each in keys),
        ]

    def was_reclaimed(self, queue: str, consumer: str) -> bool:
        """Whether others were given messages of this consumer, within a day."""
        return bool(self.run("EXISTS", self.keys(queue).reclaimed(consumer)))

    def reclaim(self, queue: str, consumer: str, ended_ms: float | None = None) -> int:
        """Put back the messages of a consumer whose lease has ended; returns how many.

        With `ended_ms` only if its lease still ends then: who has renewed it since is not dead.
        """
        self._sort_held(queue, consumer)
        given = {"limit": CALL_LIMIT, "ended_ms": "" if ended_ms is None else ended_ms}
        total, left = 0, 1
        while left:
            returned, left, *buried = self.ask("reclaim", queue, consumer, **given)
            total += returned
            self._tell_of_burials(queue, buried)
        if total and (told := instrumentation.current) is not None:
            told.reclaimed(queue, total)
        return total

    def park(
        self,
        queue: str,
        consumer: str,
        entries: Sequence[tuple[int, str, int]],
        wait: Wait = NO_WAIT,
    ) -> int:
        """Move held messages, given as (tag, id, due_ms), to the backlog, with what they wait for.

        Without a wait they were never due; with one, each is moved, also where it looks like one
        that is delayed already.
        """
        return self.ask(
            "park",
            queue,
            consumer,
            wait="" if wait is NO_WAIT else wait.member,
            reason=wait.reason,
            entries=[part for entry in entries for part in entry],
        )

    def drop(self, queue: str, consumer: str, tag: int, reason: str, record: bytes = b"") -> int:
        """Forget a held message that is not to run; returns whether it was held.

        Give the record of one that is not held: then only an event tells of it.
        """
        return self.ask("drop", queue, consumer, reason=reason, tag=tag, record=record)

    def latest(self, queue: str, key: str, due_ms: int) -> int:
        """Remember a due time of a key; returns the latest one that was given in thirty days."""
        return int(self.ask("latest", queue, key=key, due_ms=due_ms))

    def bury(
        self,
        queue: str,
        consumer: str,
        entries: Sequence[tuple[int, str, str, bytes]],
        failures: str = "",
    ) -> int:
        """Move messages, given as (tag, id, reason, record), to the dead letters.

        An empty record stands for the one that is held under the tag. `failures` is what is known
        of attempts that have failed, as text that is kept with the reason.
        """
        parts = [part for entry in entries for part in entry]
        buried = self.ask("bury", queue, consumer, failures=failures, entries=parts)
        self._tell_of_burials(queue, buried)
        return len(buried)

    def dead_count(self, queue: str) -> int:
        """How many dead letters a queue has."""
        return self.run("ZCARD", self.keys(queue).dead)

    def dead_ids(self, queue: str, start: int = 0, count: int = 100) -> list[str]:
        """A page of the ids of a queue's dead letters, the oldest first."""
        found = self.run("ZRANGE", self.keys(queue).dead, start, start + count - 1)
        return [id.decode(errors="surrogateescape") for id in found]

    def dead_page(
        self, queue: str, after: tuple[int, str] | None = None, count: int = 100
    ) -> list[tuple[int, str]]:
        """Burial times in ms and ids of dead letters, the oldest first, behind one of these.

        Which need not be there any more.
        """
        at_ms, id = after or (0, "")
        behind = b"" if after is None else b"=" + id.encode(errors="surrogateescape")
        found = self.ask("dead_page", queue, from_ms=at_ms, after=behind, limit=count)
        each = zip(found[::2], found[1::2], strict=True)
        return [(int(at), id.decode(errors="surrogateescape")) for id, at in each]

    def dead_letters(self, queue: str, ids: Sequence[str]) -> list[DeadLetter]:
        """The dead letters with these ids, without those that are there no more."""
        if not ids:
            return []
        keys = self.keys(queue)
        raw = [id.encode(errors="surrogateescape") for id in ids]
        records = self.run("HMGET", keys.dead_messages, *raw)
        notes = self.run("HMGET", keys.dead_reasons, *raw)
        return [
            DeadLetter(id, record[1:], **json.loads(note.decode(errors="replace")))
            for id, record, note in zip(ids, records, notes, strict=True)
            if record is not None and note is not None
        ]

    def replay(self, queue: str, ids: Sequence[str], due_ms: int = 0) -> int:
        """Give dead letters another try, now or at a time; returns how many there were."""
        wait = Wait(due_ms or int(time.time() * 1000)).member
        given = {"due_ms": due_ms, "wait": wait}
        return sum(self.ask("replay", queue, **given, ids=part) for part in chunks(ids))

    def purge_dead(self, queue: str, ids: Sequence[str]) -> int:
        """Drop dead letters for good; returns how many there were."""
        return sum(self.ask("forget", queue, ids=part) for part in chunks(ids))

    def size(self, queue: str) -> Size:
        """Count a queue's messages by state."""
        return Size(*self.ask("size", queue))

    def metrics(self, queue: str) -> Metrics:
        """What a control plane needs to know of a queue, in one call that changes nothing."""
        return Metrics.of(*self.ask("metrics", queue, "", limit=METRICS_LIMIT, spans=SPANS_MS))

    def purge(self, queue: str) -> int:
        """Drop what is ready and what is delayed; returns how many messages that was."""
        total = 0
        while gone := self.ask("purge", queue, limit=PURGE_LIMIT):
            total += gone
        self.clear(queue)
        return total

    def clear(self, queue: str) -> None:
        """Remove the lanes of a gate at which nothing waits any more."""
        while self.ask("clear", queue, limit=CALL_LIMIT):
            pass

    def delete(self, queue: str) -> int:
        """Purge a queue and forget it; returns how many messages that was."""
        count = self.purge(queue)
        self.ask("delete", queue)
        return count

    def forget_unused(self, queue: str) -> None:
        """Forget a queue without messages and consumers."""
        if not self.run("EXISTS", self.keys(queue).consumers):
            self.ask("delete", queue)

    def announce(self, queue: str) -> None:
        """Put wake tokens for all that can be claimed, now or later."""
        self.ask("announce", queue)

    def announce_all(self, queues: Sequence[str]) -> None:
        """As `announce` on each queue, in few round trips. Raises the first error."""
        self._all_of(self.call("announce", queue) for queue in queues)

    def announce_soon(self, queue: str) -> None:
        """As `announce`, without waiting for the answer; where it fails, others look themselves."""
        self._post(*self.call("announce", queue), on_error=lambda: None)


def delivered(answer: Any, gate: Gate | None) -> Delivered | None:
    """What the script that delivers has answered; None: the caller's lease was lost."""
    if len(answer) == 1:
        return None
    now_ms, next_due_ms, more, consumers, *records = answer
    has_more = bool(more % 2) or (gate is None and more > 1)
    return Delivered(now_ms, next_due_ms, has_more, consumers, records, more > 1)


def without_errors(answers: list[Any]) -> list[Any]:
    """The answers. Raises the first error among them."""
    for error in answers:
        if isinstance(error, BaseException):
            raise error
    return answers


def _is_over(count: Any, limit: int) -> bool:
    return isinstance(count, int) and count > limit


def chunks(entries: Sequence[T], limit: int | None = None) -> Iterable[Sequence[T]]:
    size = limit or CALL_LIMIT
    if 0 < len(entries) <= size:
        return (entries,)
    return (entries[at : at + size] for at in range(0, len(entries), size))
