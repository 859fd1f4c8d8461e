"""A store without a server: the same moves, in Python's own types.

It passes the contract tests of the real one, `tests/contract`. Unlike it, it forgets everything
with the process, ready messages of a queue with `x-expires` do not expire, it never refuses, and
messages take no turns and have no limits.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import wraps
from threading import RLock
from typing import Concatenate, ParamSpec, TypeVar

from ..gate import Gate, put_ticket
from ..keys import step_char
from ..message import Kept
from ..metrics import SPANS_MS, Metrics
from ..renewal import FAR_LEASES, Renewal, merged
from ..store import (
    CALL_LIMIT,
    DEFAULT_PARTITION_SIZE,
    DeadLetter,
    Delivered,
    Entry,
    Limits,
    Scheduled,
    Size,
)
from ..waits import NO_WAIT, Wait, without_wait
from .fake_queue import (
    FakeQueue,
    deliveries_of,
    id_of_member,
    in_bytes,
    is_same,
    message_id_of,
    put_wait_into,
    with_due_ms,
    without_deliveries,
)

P = ParamSpec("P")
R = TypeVar("R")

_PROMOTED = re.compile(rb'^\{"due_ms": ?\d+, ?')

#: Consumers that one renew names.
DEAD_LIMIT = 100


def _one_step(
    method: Callable[Concatenate[FakeStore, P], R],
) -> Callable[Concatenate[FakeStore, P], R]:
    @wraps(method)
    def alone(self: FakeStore, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock:
            return method(self, *args, **kwargs)

    return alone


class FakeStore:
    """The moves of messages that are in this process only; safe to use from several threads.

    `now` is "" for the machine's clock, `+ms` for that clock set forward, or a time in milliseconds
    since the epoch. Every method is as that of `kombu_delayed.store.Store`.
    """

    def __init__(
        self,
        *,
        priority_steps: Iterable[int] = (0, 3, 6, 9),
        limits: Limits | None = None,
        now: str = "",
    ) -> None:
        self.limits = limits or Limits()
        self.now = now
        self.partition_size = DEFAULT_PARTITION_SIZE  # of no effect here
        self.lock = RLock()
        self._steps = tuple(sorted(priority_steps))
        self._queues: dict[str, FakeQueue] = {}

    def queue(self, name: str) -> FakeQueue:
        """The insides of one queue."""
        with self.lock:
            return self._queues.setdefault(name, FakeQueue(self._steps))

    def queues(self) -> set[str]:
        """The queues that have a backlog, dead letters or consumers."""
        with self.lock:
            return {name for name, q in self._queues.items() if q.delayed or q.dead or q.consumers}

    @property
    def now_ms(self) -> int:
        """The time that the next call goes by."""
        if self.now and self.now[0] != "+":
            return int(self.now)
        return int(time.time() * 1000) + int(self.now or 0)

    @_one_step
    def take_token(self, queue: str) -> tuple[str, int] | None:
        """Take the first wake token, as a waiting consumer does: its name and when to claim."""
        wake = self.queue(queue).wake
        if not wake:
            return None
        name = min(wake, key=lambda each: (wake[each], each))
        return name, wake.pop(name)

    # Producers.

    @_one_step
    def schedule(self, queue: str, entries: Sequence[Entry], expires_ms: int = 0) -> Scheduled:
        """Keep messages until they are due. The same message with the same id is kept once."""
        q, now_ms = self.queue(queue), self.now_ms
        before, first, counts = q.earliest, None, [0, 0, 0]
        for each in entries:
            is_relative = each.due.startswith("+")
            due_ms = int(each.due) + (now_ms if is_relative else 0)
            message = each.message.encode()
            if due_ms <= now_ms:
                q.list_for(each.step).append(message)
                counts[1] += 1
            elif q.put(each.id, Kept(each.step, due_ms, message), is_relative):
                first = due_ms if first is None else min(first, due_ms)
                counts[0] += 1
            else:
                counts[2] += 1
        q.announce_due(first, before)
        if counts[1]:
            q.announce_ready()
        return Scheduled(*counts)

    @_one_step
    def schedule_unique(
        self, queue: str, entry: Entry, key: str, conflict: str, expires_ms: int = 0
    ) -> tuple[str, str]:
        """Schedule a message unless another one with this key is delayed.

        `conflict` says what then: "refuse", "replace" or "debounce". Returns what was done
        ("stored", "refused", "replaced" or "pushed") and the id of the other one, or "".
        """
        q, now_ms = self.queue(queue), self.now_ms
        before, due = q.earliest, entry.due or "0"
        due_ms = int(due) + (now_ms if due.startswith("+") else 0)
        q.forget_past_keys(now_ms)
        other, id = q.unique.get(key, ""), entry.id
        waiting, kept = q.delayed.get(other), Kept(entry.step, due_ms, entry.message.encode())
        if waiting and other == id and is_same(waiting, kept):
            return "stored", ""
        if conflict == "retry":
            if other == id:
                q.forget_key(key)
            if due_ms <= now_ms:
                self._make_ready(q, kept)
            elif q.put(id, kept, may_repeat=due.startswith("+")):
                q.announce_due(due_ms, before)
            return "stored", ""
        if waiting and conflict == "refuse":
            return "refused", other
        if waiting and conflict == "debounce":
            self._push(q, key, waiting._replace(due_ms=due_ms), before)
            return "pushed", other
        if waiting:
            q.take(other)
        if due_ms <= now_ms:
            self._make_ready(q, kept)
            q.forget_key(key)
        elif member := q.put(id, kept, may_repeat=True):
            q.announce_due(due_ms, before)
            q.unique[key], q.unique_due[key] = member, due_ms
        return ("replaced", other) if waiting else ("stored", "")

    def _push(self, q: FakeQueue, key: str, kept: Kept, before: int | None) -> None:
        member = q.unique[key]
        if kept.due_ms <= self.now_ms:
            q.take(member)
            message = with_due_ms(kept.message, kept.due_ms)
            self._make_ready(q, kept._replace(message=message))
            q.forget_key(key)
        else:
            q.keep(member, kept)
            q.announce_due(kept.due_ms, before)
            q.unique_due[key] = kept.due_ms

    def _make_ready(self, q: FakeQueue, kept: Kept) -> None:
        q.list_for(kept.step).append(kept.message)
        q.announce_ready()

    @_one_step
    def publish(self, queue: str, entries: Sequence[Entry], expires_ms: int = 0) -> int:
        """Make messages ready at once."""
        if not entries:
            return 0
        q = self.queue(queue)
        for each in entries:
            q.list_for(each.step).append(each.message.encode())
        q.announce_ready()
        return len(entries)

    # Consumers.

    @_one_step
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
        A `gate` counts for nothing: messages take no turns here, and no slots.
        """
        q, now_ms = self.queue(queue), self.now_ms
        lease_end_ms = q.consumers.get(consumer)
        if lease_end_ms == 0 or (leased and lease_end_ms is None):
            return None
        if lease_ms > 0:
            q.consumers[consumer] = max(now_ms + lease_ms, lease_end_ms or 0)
        more = q.promote(now_ms, promotions)
        records = _pop(q, want)
        if lease_ms > 0:
            q.held(consumer).update(enumerate(records, tag))
            if records:
                q.consumers[consumer] = now_ms + lease_ms
        more = more or q.any_ready
        if more:
            q.announce_ready()
        else:
            q.wake.pop("now", None)
        takes_over = not leased and lease_ms > 0
        next_ms = _promise(q, consumer, now_ms, takes_over, bool(records)) if waits else 0
        return Delivered(now_ms, next_ms, more, len(q.consumers), records)

    @_one_step
    def admit(
        self, queue: str, consumer: str, entries: Sequence[tuple[int, str, bytes]], gate: Gate
    ) -> int:
        """Give held messages, given as (tag, ticket, record), tickets; they are ready again."""
        q, count = self.queue(queue), 0
        for tag, ticket, given in entries:
            record = given or q.held(consumer).pop(tag, b"")
            if record:
                message = put_ticket(record[1:].decode(), ticket).encode()
                q.list_for(record[0] - 48).append(message)
                count += 1
        q.announce_ready()
        return count

    def free(
        self, queue: str, consumer: str, tags: Sequence[int], on_error: Callable[[], None]
    ) -> None:
        """Nothing: messages have no slots here."""

    def clear(self, queue: str) -> None:
        """Nothing: there is no gate here."""

    def waiting(self, queue: str) -> int:
        """None wait for their turn here."""
        return 0

    def running(self, queue: str) -> dict[str, int]:
        """There are no slots here."""
        return {}

    @_one_step
    def recover(self, queue: str, consumer: str, seen_tag: int) -> list[tuple[int, bytes]]:
        """Messages that were handed to `consumer` in an answer that never arrived."""
        held = self.queue(queue).held(consumer)
        return sorted((tag, record) for tag, record in held.items() if tag > seen_tag)

    @_one_step
    def ack(
        self,
        queue: str,
        consumer: str,
        tags: Sequence[int],
        on_error: Callable[[], None],
        freed: Sequence[int] = (),
    ) -> None:
        """Forget messages for good. What is not held stays as it is; `on_error` is never called."""
        held = self.queue(queue).held(consumer)
        for tag in tags:
            held.pop(tag, None)

    @_one_step
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
        buries = self._poison_test(queue, consumer) if counted else None
        return self.queue(queue).give_back(consumer, tags, int(counted), buries, behind)

    @_one_step
    def leave(self, queue: str, consumer: str, running: Collection[int] = ()) -> None:
        """Release all that `consumer` holds, pass its promise on and end its lease."""
        q = self.queue(queue)
        q.give_back(consumer, list(q.held(consumer)), 0)
        self._forget_consumer(q, consumer)

    @_one_step
    def consumers(self, queue: str) -> list[tuple[str, int, int]]:
        """Who consumes: name, ms until its lease ends, unacked messages; who ends first leads."""
        q, now_ms = self.queue(queue), self.now_ms
        return [
            (name, max(q.consumers[name] - now_ms, -1), len(q.held(name))) for name in _by_lease(q)
        ]

    def renew(self, queue: str, consumer: str, lease_ms: int) -> list[str] | None:
        """Make the lease last in one queue; returns None where it was lost.

        Else those whose lease there is over by the server's clock, which need not be dead.
        """
        renewal = self.renew_all([queue], [queue], consumer, lease_ms, lease_ms)
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

        They last for `idle_ms` where it holds nothing.
        """
        return merged(
            ([q], self._renewed(q, q in renewed, consumer, lease_ms, idle_ms)) for q in queues
        )

    @_one_step
    def _renewed(
        self, queue: str, is_renewed: bool, consumer: str, lease_ms: int, idle_ms: int
    ) -> tuple[object, ...]:
        """What the script says of one queue."""
        q, now_ms = self.queue(queue), self.now_ms
        own_ms, is_idle = q.consumers.get(consumer, 0), not q.held(consumer)
        if is_renewed and own_ms:
            q.consumers[consumer] = now_ms + (idle_ms if is_idle else lease_ms)
        others = {name: q.consumers[name] for name in _by_lease(q) if name != consumer}
        latest_ms = now_ms + lease_ms * FAR_LEASES
        lasting = [end_ms for end_ms in others.values() if now_ms < end_ms <= latest_ms]
        odd = [(1, in_bytes(name), at) for name, at in others.items() if at not in lasting]
        return (
            now_ms,
            own_ms,
            min(lasting, default=0),
            [1] if is_renewed and not own_ms else [],
            [1] if is_renewed and own_ms and is_idle else [],
            [part for each in odd[:DEAD_LIMIT] for part in each],
        )

    @_one_step
    def reclaim(self, queue: str, consumer: str, ended_ms: int | None = None) -> int:
        """Put back the messages of a consumer whose lease has ended; returns how many.

        With `ended_ms` only if its lease still ends then.
        """
        q = self.queue(queue)
        end_ms = q.consumers.get(consumer, 0)
        if end_ms and (end_ms > self.now_ms if ended_ms is None else end_ms != ended_ms):
            return 0
        buries = self._poison_test(queue, consumer)
        count = q.give_back(consumer, list(q.held(consumer)), 1, buries)
        self._forget_consumer(q, consumer)
        return count

    def _forget_consumer(self, q: FakeQueue, consumer: str) -> None:
        q.disarm(consumer)
        q.consumers.pop(consumer, None)
        q.unacked.pop(consumer, None)
        q.announce_all()

    @_one_step
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
        q = self.queue(queue)
        held, before, parked = q.held(consumer), q.earliest, []
        for tag, id, due_ms in entries:
            record = held.pop(tag, None)
            if record is not None:
                message = record[1:]
                if wait is not NO_WAIT:
                    message = put_wait_into(message, wait)
                q.put(id, Kept(record[0] - 48, due_ms, message), wait is not NO_WAIT)
                parked.append(due_ms)
        q.announce_due(min(parked, default=None), before)
        return len(parked)

    @_one_step
    def drop(self, queue: str, consumer: str, tag: int, reason: str, record: bytes = b"") -> int:
        """Forget a held message that is not to run; returns whether it was held.

        Give the record of one that is not held: then only an event tells of it.
        """
        return int(self.queue(queue).held(consumer).pop(tag, record or None) is not None)

    @_one_step
    def latest(self, queue: str, key: str, due_ms: int) -> int:
        """Remember a due time of a key; returns the latest one that was given in thirty days."""
        known = self.queue(queue).latest
        known[key] = max(due_ms, known.get(key, due_ms))
        return known[key]

    # Dead letters.

    @_one_step
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
        held, buried = self.queue(queue).held(consumer), 0
        for tag, id, reason, given in entries:
            record = given or held.get(tag)
            if record:
                deliveries = deliveries_of(record) + 1
                self._entomb(queue, id, record, consumer, reason, deliveries, failures)
                held.pop(tag, None)
                buried += 1
        return buried

    def _entomb(
        self,
        queue: str,
        id: str,
        record: bytes,
        consumer: str,
        reason: str,
        deliveries: int,
        failures: str = "",
    ) -> None:
        letter = DeadLetter(id, record[1:], reason, consumer, self.now_ms, deliveries, failures)
        self.queue(queue).entomb(letter, record[0] - 48, self.limits)

    def _poison_test(self, queue: str, consumer: str) -> Callable[[bytes, int], bool]:
        def buries(record: bytes, deliveries: int) -> bool:
            most = self.limits.max_deliveries
            if not most or deliveries < most:
                return False
            reason = f"delivered {deliveries} times without success"
            self._entomb(queue, message_id_of(record[1:]), record, consumer, reason, deliveries)
            return True

        return buries

    def dead_count(self, queue: str) -> int:
        """How many dead letters a queue has."""
        return len(self.queue(queue).dead)

    @_one_step
    def dead_ids(self, queue: str, start: int = 0, count: int = 100) -> list[str]:
        """A page of the ids of a queue's dead letters, the oldest first."""
        return self.queue(queue).dead_in_order[start : start + count]

    @_one_step
    def dead_page(
        self, queue: str, after: tuple[int, str] | None = None, count: int = 100
    ) -> list[tuple[int, str]]:
        """Burial times in ms and ids of dead letters, the oldest first, behind one of these.

        Which need not be there any more.
        """
        q = self.queue(queue)
        found = [(q.dead[id][1].at_ms, id) for id in q.dead_in_order]
        at_ms, last = after or (0, "")
        place = at_ms, in_bytes(last) if after else b""
        return [(at, id) for at, id in found if after is None or (at, in_bytes(id)) > place][:count]

    @_one_step
    def dead_letters(self, queue: str, ids: Sequence[str]) -> list[DeadLetter]:
        """The dead letters with these ids, without those that are there no more."""
        dead = self.queue(queue).dead
        return [dead[id][1] for id in ids if id in dead]

    @_one_step
    def replay(self, queue: str, ids: Sequence[str], due_ms: int = 0) -> int:
        """Give dead letters another try, now or at a time; returns how many there were."""
        q = self.queue(queue)
        before = q.earliest
        found = [(id, *q.dead.pop(id)) for id in ids if id in q.dead]
        for id, step, letter in found:
            message = without_deliveries(letter.message)
            if without_wait(message) != message:
                message = put_wait_into(message, Wait(due_ms or self.now_ms))
            if due_ms and message.startswith(b"{"):
                q.put(id_of_member(id), Kept(step, due_ms, _without_due_ms(message)), True)
            else:
                q.list_for(step).append(message)
        if ids and q.any_ready:
            q.announce_ready()
        if ids:
            q.announce_due(q.earliest, before)
        return len(found)

    @_one_step
    def purge_dead(self, queue: str, ids: Sequence[str]) -> int:
        """Drop dead letters for good; returns how many there were."""
        dead = self.queue(queue).dead
        return sum(dead.pop(id, None) is not None for id in ids)

    # The whole queue.

    @_one_step
    def size(self, queue: str) -> Size:
        """Count a queue's messages by state."""
        q, now_ms = self.queue(queue), self.now_ms
        due = sum(kept.due_ms <= now_ms for kept in q.delayed.values())
        return Size(sum(map(len, q.ready.values())), due, len(q.delayed))

    @_one_step
    def metrics(self, queue: str) -> Metrics:
        """What a control plane needs to know of a queue, in one call that changes nothing."""
        q, now_ms = self.queue(queue), self.now_ms
        ahead_ms = sorted(kept.due_ms - now_ms for kept in q.delayed.values())
        later_ms = [ms for ms in ahead_ms if ms > 0]
        waiting = [*ahead_ms, *(due_ms - now_ms for due_ms in q.ready_due_ms)]
        ages_ms = [-ms for ms in waiting if ms <= 0]
        return Metrics.of(
            len(ahead_ms),
            len(ahead_ms) - len(later_ms),
            0,
            sum(map(len, q.ready.values())),
            sum(len(q.held(name)) for name in q.consumers),
            len(q.dead),
            sum(end_ms > now_ms for end_ms in q.consumers.values()),
            max(ages_ms, default=-1),
            min(later_ms, default=-1),
            0,
            -1,
            *(sum(ms <= span_ms for ms in later_ms) for span_ms in SPANS_MS),
        )

    @_one_step
    def purge(self, queue: str) -> int:
        """Drop what is ready and what is delayed; returns how many messages that was."""
        q = self.queue(queue)
        count = sum(map(len, q.ready.values())) + len(q.delayed)
        for each in q.ready.values():
            each.clear()
        q.delayed.clear()
        q.duplicates.clear()
        q.forget_urgent()
        q.wake.clear()
        return count

    @_one_step
    def delete(self, queue: str) -> int:
        """Purge a queue and forget it; returns how many messages that was."""
        count = self.purge(queue)
        self.queue(queue).armed = None
        return count

    @_one_step
    def forget_unused(self, queue: str) -> None:
        """Forget a queue without messages and consumers."""
        if not self.queue(queue).consumers:
            self.queue(queue).armed = None

    @_one_step
    def announce(self, queue: str) -> None:
        """Put wake tokens for all that can be claimed, now or later."""
        q = self.queue(queue)
        q.armed = None
        q.announce_all()


def _pop(q: FakeQueue, want: int) -> list[bytes]:
    """The next ready messages as records, the most urgent first."""
    records: list[bytes] = []
    for step, waiting in q.ready.items():
        mark = step_char(step).encode()
        while waiting and len(records) < want:
            records.append(mark + waiting.popleft())
    return records


def _promise(q: FakeQueue, consumer: str, now_ms: int, takes_over: bool, has_records: bool) -> int:
    """When this consumer shall claim next, 0 where another one has promised to."""
    next_ms, (promised_ms, holder) = q.earliest, q.armed or (0, "")
    free = holder in ("", consumer) or promised_ms <= now_ms
    if next_ms is not None and (free or takes_over or promised_ms > next_ms):
        if has_records and len(q.consumers) > 1:
            # Its turn is over: the next one to come is who has waited longest.
            q.armed = None
            q.announce_due(next_ms)
            return 0
        q.armed = next_ms, consumer
        return next_ms
    q.disarm(consumer)
    return 0


def _by_lease(q: FakeQueue) -> list[str]:
    return sorted(q.consumers, key=lambda name: (q.consumers[name], in_bytes(name)))


def _without_due_ms(message: bytes) -> bytes:
    return _PROMOTED.sub(b"{", message)
