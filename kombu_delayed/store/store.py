"""All moves of messages, each a short method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ..message.envelope import Entry
from ..message.ticket import Gate
from ..message.wait import NO_WAIT, Wait
from .calls import instrumentation
from .calls.caller import CALL_LIMIT, Caller, Limits, Scheduled, chunks
from .calls.scripts import Call
from .claimable import ANSWER_BYTES, Claimable, Delivered
from .dead_letters import DeadLetters
from .global_limits import lacks
from .leases import Leases
from .policies.declared import PolicyRecords
from .policies.overrides import Overrides
from .policies.pauses import Pauses
from .queue_metrics import COUNT_LIMIT, SPANS_MS, Metrics, Size

__all__ = ["CALL_LIMIT", "Delivered", "Entry", "Limits", "Scheduled", "Size", "Store"]
__all__ += ["UniqueOutcome", "chunks", "delivered", "unique_listeners"]

#: How many delayed messages one call drops.
PURGE_LIMIT = 5_000


class UniqueOutcome(NamedTuple):
    """The outcome for a message with a unique key, and for the delayed message with the same key.

    `done` is "stored", "refused", "replaced" or "pushed". `other` is the name of the other message
    in the backlog, or "". `state` is the state of the message now: "delayed", "ready", or "already"
    if it was not stored. `due_ms` is its due time, even if it was not stored. `replaced` is the
    record of the message that it replaced, or empty.
    """

    done: str
    other: str
    state: str
    due_ms: int
    replaced: bytes


#: Called with queue, id and outcome when this process has sent a message with a unique key.
unique_listeners: list[Callable[[str, str, UniqueOutcome], None]] = []


class Store(Caller):
    """All moves of messages in one Redis database. `Caller` describes the arguments."""

    @property
    def dead(self) -> DeadLetters:
        """The dead letters."""
        return DeadLetters(self)

    @property
    def leases(self) -> Leases:
        """The consumers and the messages that they hold."""
        return Leases(self)

    @property
    def claimable(self) -> Claimable:
        """Checks and announces that there is something to claim."""
        return Claimable(self)

    @property
    def overrides(self) -> Overrides:
        """The limits that were changed at run time."""
        return Overrides(self)

    @property
    def policies(self) -> PolicyRecords:
        """The declared policies of queues."""
        return PolicyRecords(self)

    @property
    def pauses(self) -> Pauses:
        """The pauses of queues."""
        return Pauses(self)

    def schedule(self, queue: str, entries: Sequence[Entry], expires_ms: int = 0) -> Scheduled:
        """Store messages until they are due. The same message with the same id is stored once."""
        counts = [0, 0, 0]
        for chunk in chunks(entries):
            move, given = self.schedule_call(queue, chunk, expires_ms)
            found = self.scheduled(queue, move(self.send, **given))
            counts = [a + b for a, b in zip(counts, found, strict=True)]
        if counts[0] and (meter := instrumentation.current) is not None:
            meter.scheduled(queue, counts[0])
        return Scheduled(*counts)

    def schedule_call(self, queue: str, entries: Sequence[Entry], expires_ms: int = 0) -> Call:
        """The script that schedules and its arguments, to be sent in a pipeline."""
        make, dictionary = self.packer(queue, expires_ms)
        given = [part for e in entries for part in (e.id, e.due, make(e.id, e.front, e.message))]
        more = {"expires_ms": expires_ms, "dictionary": dictionary}
        return self.call("schedule", queue, **more, entries=given)

    def schedule_unique(
        self,
        queue: str,
        entry: Entry,
        key: str,
        conflict: str,
        expires_ms: int = 0,
        until_end: bool = False,
        replaces: bool = False,
    ) -> tuple[str, str]:
        """Schedule a message unless another message with this key is delayed.

        With `until_end` the message holds the key until its task has ended, and others are refused
        until then. With `replaces` it takes over the key of the running task that has its id.

        `conflict` decides what happens to a second message: "refuse", "replace" or "debounce".
        "retry" schedules it anyway. Returns what was done ("stored", "refused", "replaced" or
        "pushed") and the id of the other message, or "".
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
            until_end=int(until_end),
            replaces=int(replaces),
        )
        done, other, state, due_ms, replaced = move(self.send, **given)
        name = other.decode(errors="surrogateescape")
        outcome = UniqueOutcome(done.decode(), name, state.decode(), int(due_ms), replaced)
        if outcome.state == "delayed" and (meter := instrumentation.current) is not None:
            meter.scheduled(queue, 1)
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
        """The script that publishes and its arguments, to be sent in a pipeline."""
        records = [entry.record for entry in entries]
        return self.call("publish", queue, expires_ms=expires_ms, records=records)

    def cancel_call(self, queue: str, ids: Sequence[str], how: str = "all") -> Call:
        """The script that cancels and its arguments, to be sent in a pipeline."""
        return self.call("cancel", queue, how=how, ids=ids)

    def restore_call(self, queue: str, entries: Sequence[tuple[bytes, ...]]) -> Call:
        """The script that restores messages, given as (member, record), and its arguments."""
        parts = [part for entry in entries for part in entry]
        return self.call("restore", queue, "", run="", attempt="", ledger_seconds=0, entries=parts)

    def deliver(
        self, queue: str, consumer: str, want: int, tag: int, gate: Gate | None = None, **more: Any
    ) -> Delivered | None:
        """Promote due messages and hand out up to `want` messages under tags from `tag` upwards.

        `deliver_call` describes the other arguments. Returns None if the lease of a `leased` caller
        has expired.
        """
        move, given = self.deliver_call(queue, consumer, want, tag, gate=gate, **more)
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
        most_bytes: int = ANSWER_BYTES,
        expires_ms: int = 0,
        declared: str = "",
        gate: Gate | None = None,
        taken: str = "",
    ) -> Call:
        """The script that delivers and its arguments; `delivered` reads its answer.

        With `lease_ms` 0, messages are deleted on delivery. A consumer that `listens` gets wake
        tokens when nothing is left for it. With a `gate`, messages are delivered if it is their
        turn, or if they have no ticket: see `admit`. `declared` is the version of the caller's
        policies: with an outdated one it gets nothing. `taken` has slots of limits, by `text_of`.
        """
        gated = {}
        if gate is not None:
            gated = {"version": gate.version, "limits": gate.numbers, "taken": taken}
        return self.call(
            "deliver" if gate is None else "deliver_gated",
            queue,
            consumer,
            leased=int(leased),
            lease_ms=lease_ms,
            want=want,
            tag=tag,
            promotions=promotions,
            most_bytes=most_bytes,
            waits=2 if listens else int(waits),
            expires_ms=expires_ms,
            declared=declared,
            **gated,
        )

    def admit(
        self, queue: str, consumer: str, entries: Sequence[tuple[int, str, bytes]], gate: Gate
    ) -> int:
        """Let held messages, given as (tag, ticket, record), wait for their turn; returns how many.

        An empty record stands for the one held under the tag. The tickets belong to `gate`.
        """
        parts = [part for entry in entries for part in entry]
        return self.ask("admit", queue, consumer, limits=gate.numbers, entries=parts)

    def free(
        self, queue: str, consumer: str, tags: Sequence[int], on_error: Callable[[], None]
    ) -> None:
        """Release the slots of messages whose tasks have ended. Idempotent.

        Does not wait: `on_error` is called later if the server did not do it.
        """
        self.post(*self.call("free", queue, consumer, tags=tags), on_error)

    def ack(
        self,
        queue: str,
        consumer: str,
        tags: Sequence[int],
        on_error: Callable[[], None],
        freed: Sequence[int] = (),
    ) -> None:
        """Delete held messages. Idempotent: messages that are not held do not change.

        The slots of messages in `freed` are released, as by `free`. Does not wait: `on_error` is
        called later if the server did not do it.
        """
        if freed:
            given = {"freed": " ".join(map(str, freed)), "tags": tags}
            self.post(*self.call("ack_gated", queue, consumer, **given), on_error)
        elif self.event_limit:
            self.post(*self.call("ack", queue, consumer, tags=tags), on_error)
        else:
            self.run.post("HDEL", self.keys(queue).unacked(consumer), *tags, on_error=on_error)

    def release(
        self,
        queue: str,
        consumer: str,
        tags: Iterable[int],
        *,
        counted: bool = False,
        behind: bool = False,
    ) -> int:
        """Put held messages back: at the heads, or in order `behind`; `counted` as an attempt."""
        total, left = 0, [*tags] if behind else sorted(tags, reverse=True)
        while part := left[:CALL_LIMIT]:
            given = {"counted": int(counted), "behind": int(behind), "tags": part}
            count, seen, *buried = self.ask("release", queue, consumer, **given)
            total, left = total + count, left[seen:]
            instrumentation.count_buried(self, queue, buried)
        return total

    def park(
        self,
        queue: str,
        consumer: str,
        entries: Sequence[tuple[int, str, int]],
        wait: Wait = NO_WAIT,
    ) -> int:
        """Move held messages, given as (tag, id, due_ms), to the backlog.

        With a wait, which contains the reason, each message is moved even if an equal one is
        already delayed. Without a wait, the messages were never due.
        """
        return self.ask(
            "park",
            queue,
            consumer,
            wait="" if wait is NO_WAIT else wait.member,
            reason=wait.reason,
            entries=[part for entry in entries for part in entry],
        )

    def drop(
        self,
        queue: str,
        consumer: str,
        tag: int,
        reason: str,
        record: bytes = b"",
        ends: bool = True,
    ) -> int:
        """Delete a held message that must not run. Returns whether it was held.

        Pass its record if it is not held: then only an event is written. With `ends=False` its task
        continues, as in a retry.
        """
        given = {"reason": reason, "tag": tag, "record": record, "ends": int(ends)}
        return self.ask("drop", queue, consumer, **given)

    def bury(
        self,
        queue: str,
        consumer: str,
        entries: Sequence[tuple[int, str, str, bytes]],
        failures: str = "",
    ) -> int:
        """Move messages, given as (tag, id, reason, record), to the dead letters.

        An empty record stands for the one held under the tag. `failures` is text about the failed
        attempts, which is stored with the reason.
        """
        parts = [part for entry in entries for part in entry]
        buried = self.ask("bury", queue, consumer, failures=failures, entries=parts)
        instrumentation.count_buried(self, queue, buried)
        return len(buried)

    def size(self, queue: str, *, with_delayed: bool = True) -> Size:
        """Count a queue's messages by state. Without `with_delayed`, `delayed` is 0.

        A large queue takes several calls: what changes meanwhile may be counted or not.
        """
        return self._counted(queue, 0, 0 if with_delayed else -1)

    def delayed_count(self, queue: str) -> int:
        """Count the delayed messages, due or not."""
        return self._counted(queue, -1, 0).delayed

    def _counted(self, queue: str, place: int, bucket: int) -> Size:
        total = Size(0, 0, 0)
        while place >= 0 or bucket >= 0:
            given = {"place": place, "bucket": bucket, "limit": COUNT_LIMIT}
            *counts, place, bucket = self.ask("size", queue, **given)
            total = Size(*map(sum, zip(total, counts, strict=True)))
        return total

    def records(self, queue: str, members: Sequence[str | bytes]) -> list[bytes | None]:
        """Priority step + due time + message of each message; None for one that is not delayed."""
        return self.fields(queue, self.keys(queue).messages, members)

    def metrics(self, queue: str) -> Metrics:
        """The metrics of a queue for autoscalers. One call, which only reads."""
        return Metrics.of(self.ask("metrics", queue, "", limit=COUNT_LIMIT, spans=SPANS_MS))

    def purge(self, queue: str) -> int:
        """Delete ready and delayed messages. Returns their number."""
        total, more = 0, 1
        while more:  # not until it is empty: others may send all the time
            count, more = self.ask("purge", queue, limit=PURGE_LIMIT)
            total += count
        self.clear(queue)
        self.dictionaries.forget_unused(queue, 0)
        return total

    def clear(self, queue: str) -> None:
        """Remove the empty lanes of a gate."""
        while self.ask("clear", queue, limit=CALL_LIMIT):
            pass

    def delete(self, queue: str) -> int:
        """Delete a queue with its messages. Returns their number."""
        count = self.purge(queue)
        self.ask("delete", queue, keeps_offered=1)
        return count

    def forget_unused(self, queue: str) -> None:
        """Forget a queue without messages and consumers, and all of its policies."""
        if not self.run("EXISTS", self.keys(queue).consumers):
            self.ask("delete", queue, keeps_offered="")
            self.dictionaries.forget_unused(queue, 0)


def delivered(answer: Any, gate: Gate | None) -> Delivered | None:
    """Read the answer of the script that delivers; None if the caller has lost its lease."""
    if len(answer) == 1:
        return None
    now_ms, next_due_ms, flags, consumers, *records = answer
    gated, refused = bool(flags & 2), bool(flags & 4)
    resumed_ms = records.pop(0) if flags & 8 else None
    lacking = lacks(records.pop(0)) if flags & 16 else ()
    paused = resumed_ms == 0
    has_more = not paused and (bool(flags & 1) or (gate is None and gated))
    found = now_ms, next_due_ms, has_more, consumers, records
    return Delivered(*found, gated, refused, paused, resumed_ms or 0, lacking)
