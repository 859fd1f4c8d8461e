"""Unacknowledged messages of a channel: acks in batches, rejects one by one."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby, islice
from operator import itemgetter
from time import monotonic
from typing import Any, NamedTuple, TypeVar

from kombu.transport import virtual

from ..message.envelope import REASON_LENGTH, UNREADABLE_BODY
from ..store.store import CALL_LIMIT, Store
from .lease.lease import Lease
from .standstill import Unbegun

T = TypeVar("T")

#: So many of the last ones are told again to a server that may not have heard of them.
RECENT_LIMIT = 1_000

#: Slots that come back wait so long for acks to go with: a call less for each task.
FREE_SECONDS = 0.003

#: What to do with a held message that its consumer is done with.
ACK, REQUEUE, RELEASE, GIVE_BACK, BURY = "ack", "requeue", "release", "give back", "bury"


class Done(NamedTuple):
    """A message that its consumer is done with, and what is to become of it."""

    verb: str
    queue: str
    tag: int
    id: str


_verb_and_queue, _queue_of_freed = itemgetter(0, 1), itemgetter(0)


def _first_alike(waiting: deque[T], key: Callable[[T], Any]) -> list[T]:
    """The first ones that have the same key, as many as one call takes."""
    for _, alike in groupby(tuple(waiting), key):
        return list(islice(alike, CALL_LIMIT))
    return []


class Message(virtual.Message):
    """A message that, where its body cannot be decoded, becomes a dead letter when it is acked."""

    def _decode(self) -> Any:
        try:
            return super()._decode()
        except Exception as error:
            self.channel.qos.unreadable(self.delivery_tag, error)
            raise


class QoS(virtual.QoS):
    """Counts what is outstanding and passes acks and rejects to the store.

    An ack or a reject that meets a broken connection is kept and done when the broker is back.
    """

    restore_at_shutdown = True

    def __init__(self, channel: Any, prefetch_count: int = 0) -> None:
        super().__init__(channel, prefetch_count)
        self._held: dict[int, tuple[str, str]] = {}
        self._done: deque[Done] = deque()
        self._failed: set[int] = set()
        self._unreadable: dict[int, str] = {}
        self._because: dict[int, str] = {}
        self._recent: deque[Done] = deque(maxlen=RECENT_LIMIT)
        self._told_over = 0
        #: Tags of messages that their program has not begun, and says so when it does.
        self._waiting: set[int] = set()
        #: The one that is being handed to its program just now, and whether it has gone back.
        self._in_hand: int | None = None
        self._has_gone = False
        #: Queues whose programs say when they begin.
        self._say_when: set[str] = set()
        #: Tags of messages with slots -> their queues.
        self._slots: dict[int, str] = {}
        #: Those of them whose slots are their tasks', which say when they end.
        self._tasks: set[int] = set()
        self._freed: deque[tuple[str, int]] = deque()
        self._freed_lately: deque[tuple[str, int]] = deque(maxlen=RECENT_LIMIT)
        self._free_at = 0.0
        #: How many of `task_ended` have given slots back.
        self.ends = 0
        self._flushing = threading.RLock()  # a signal handler may interrupt a flush with another
        self._flush_asked = False

    @property
    def has_unsent(self) -> bool:
        """Whether anything waits for the next flush."""
        return bool(self._done or self._freed)

    @property
    def has_rejects(self) -> bool:
        """Whether what waits for the next flush is not all acks."""
        return any(done.verb != ACK for done in tuple(self._done))

    @property
    def has_freed(self) -> bool:
        """Whether there are slots to be given back."""
        return bool(self._freed)

    @property
    def free_at(self) -> float:
        """When slots are to be given back without acks, by the monotonic clock."""
        return self._free_at if self._freed else math.inf

    @property
    def outstanding(self) -> int:
        """How many messages were handed out and not acked."""
        return len(self._delivered) - len(self._dirty)

    def received(self, tag: int, queue: str, id: str) -> None:
        """A message is about to be handed out."""
        self._held[tag] = queue, id

    def withdraw(self, tag: int) -> None:
        """A message was given back when it was about to be handed out."""
        self._held.pop(tag, None)

    def ack(self, delivery_tag: Any) -> None:
        """The message was dealt with; one that could not be read is not gone for that."""
        self._finish(BURY if delivery_tag in self._unreadable else ACK, delivery_tag)

    def reject(self, delivery_tag: Any, requeue: bool = False) -> None:
        """Put the message back into its queue, behind what waits, or bury it."""
        self._finish(REQUEUE if requeue else BURY, delivery_tag)

    def ended(self, tag: int) -> None:
        """What was at work on the message was ended: it returns with the next flush."""
        queue = self.queue_of(tag)
        if queue is not None:
            super().ack(tag)
            self._waiting.discard(tag)
            self.give_back(queue, [tag])
            self._held.pop(tag, None)

    def has_slots(self, tag: int, queue: str) -> None:
        """A message was claimed that has slots until it was dealt with."""
        self._slots[tag] = queue

    def keep_slots(self, tag: int) -> bool:
        """Until `task_ended`, whenever it is acked; returns whether it has slots."""
        if tag not in self._slots:
            return False
        self._tasks.add(tag)
        return True

    def task_ended(self, tag: int) -> bool:
        """The task of a message has ended; returns whether there are slots to be given back."""
        if tag not in self._tasks or not self.free(tag):
            return False
        self.ends += 1
        return True

    def running(self, queue: str) -> list[int]:
        """Tags of messages of a queue whose tasks have not ended and have slots."""
        return [tag for tag in tuple(self._tasks) if self._slots.get(tag) == queue]

    def free(self, tag: int) -> bool:
        """A message's slots return with the next flush; returns whether it had some."""
        queue = self._slots.pop(tag, None)
        self._tasks.discard(tag)
        if queue is None:
            return False
        if not self._freed:
            self._free_at = monotonic() + FREE_SECONDS
        self._freed.append((queue, tag))
        return True

    @contextmanager
    def in_hand(self, tag: int) -> Iterator[None]:
        """While a message is handed to its program, which may say that it does not begin yet."""
        self._in_hand, self._has_gone = tag, False
        try:
            yield
        finally:
            self._in_hand = None

    def wait(self, tag: int) -> None:
        """The program calls `begin` before it begins on a message: until then it can go back."""
        if not (tag == self._in_hand and self._has_gone):
            self._waiting.add(tag)
        if (queue := self.queue_of(tag)) is not None:
            self._say_when.add(queue)
        self._in_hand = None

    def begin(self, tag: int) -> bool:
        """Whether the program may begin on a message that waits: it has not gone back."""
        try:
            self._waiting.remove(tag)  # whichever thread does it decides
        except KeyError:
            return False
        return True

    def _finish(self, verb: str, tag: Any) -> None:
        super().ack(tag)
        self._waiting.discard(tag)
        held = self._held.pop(tag, None)
        if held is not None:
            queue, id = held
            self._done.append(Done(verb, queue, tag, id))
            if tag not in self._tasks:
                self.free(tag)
            self.channel.on_done()

    def because(self, tag: int, reason: str) -> None:
        """Why a message is about to be rejected, for its dead letter."""
        self._because[tag] = reason[:REASON_LENGTH]

    def _reason(self, tag: int) -> str:
        return self._unreadable.get(tag) or self._because.get(tag) or "rejected"

    def unreadable(self, tag: int, error: Exception) -> None:
        """The body of a message that was handed out cannot be decoded: it will be buried."""
        self._unreadable[tag] = f"{UNREADABLE_BODY}: {error}"[:REASON_LENGTH]

    def free_unheard(self, queue: str, tags: Iterable[int]) -> None:
        """What was claimed in an answer that was lost goes back, with slots it may have."""
        for tag in tags:
            self._slots.pop(tag, None)
            self._freed.append((queue, tag))

    def give_back(self, queue: str, tags: Iterable[int]) -> None:
        """Messages that were claimed and not handed out return with the next flush."""
        for tag in tags:
            self._done.append(Done(GIVE_BACK, queue, tag, ""))
            self.free(tag)

    def give_back_waiting(self, queue: str) -> None:
        """Messages that were handed out and not begun return with the next flush."""
        if (tag := self._in_hand) is not None and queue in self._say_when:
            self._has_gone = self.queue_of(tag) == queue
            if self._has_gone:
                self._waiting.add(tag)
        for tag in sorted(self._waiting, reverse=True):
            if self.queue_of(tag) == queue and self.begin(tag):
                self.ended(tag)

    def take_waiting(self) -> list[Unbegun]:
        """Take messages that were handed out and not begun from their program. From any thread."""
        found = []
        for tag in sorted(self._waiting, reverse=True):
            queue = self.queue_of(tag)
            if queue is not None and self.begin(tag):
                super().ack(tag)
                self._held.pop(tag, None)
                found.append(Unbegun(queue, tag, self.take_slots(tag)))
        return found

    def take_slots(self, tag: int) -> bool:
        """Whoever calls this gives back the slots of a message; returns whether it has some."""
        self._tasks.discard(tag)
        return self._slots.pop(tag, None) is not None

    def flush(self, store: Store, lease: Lease, slots_wait: bool = False) -> None:
        """Tell the server of acks, rejects and slots. What fails stays for the next time.

        With `slots_wait` slots go with acks, and without any at `free_at`.
        Where another thread is at it, that one does it: a signal handler may have interrupted that
        to wait for this one.
        """
        self._flush_asked = True
        while self._flush_asked and self._flushing.acquire(blocking=False):
            try:
                self._flush_asked = False
                if (generation := store.run.generation) != self._told_over:
                    self._tell_again(generation)
                if self._done:
                    self._flush_done(store, lease)
                if self._freed and (not slots_wait or monotonic() >= self._free_at):
                    self._flush_slots(store, lease)
            finally:
                self._flushing.release()

    def _tell_again(self, generation: int) -> None:
        """A new connection may be to a replica that has become the master before it heard all."""
        self._told_over = generation
        self._done.extendleft(reversed(self._recent))
        self._recent.clear()
        self._freed.extendleft(reversed(self._freed_lately))
        self._freed_lately.clear()

    def settle(self, store: Store, lease: Lease) -> None:
        """Flush and wait for the answers; what the server has refused once is tried once more."""
        for _ in range(2):
            with self._flushing:
                self.flush(store, lease)
            store.run.settle()

    def _flush_done(self, store: Store, lease: Lease) -> None:
        while self._done:
            self._flush_batch(store, lease)

    def _flush_slots(self, store: Store, lease: Lease) -> None:
        while self._freed:
            self._flush_freed(store, lease)

    def _flush_freed(self, store: Store, lease: Lease) -> None:
        batch = _first_alike(self._freed, _queue_of_freed)
        queue = batch[0][0]
        again = self._freed.extend
        tags = [tag for _, tag in batch]
        store.free(queue, lease.consumer, tags, on_error=lambda: again(batch))
        self._have_told_freed(batch)

    def _have_told_freed(self, batch: list[tuple[str, int]]) -> None:
        for each in batch:
            if self._freed and self._freed[0] is each:
                self._freed_lately.append(self._freed.popleft())

    def _flush_batch(self, store: Store, lease: Lease) -> None:
        batch = _first_alike(self._done, _verb_and_queue)
        verb, queue = batch[0][:2]
        if verb == ACK:
            self._ack(store, lease, queue, batch)
        elif verb in (REQUEUE, RELEASE, GIVE_BACK):
            tags, counted = [done.tag for done in batch], verb != GIVE_BACK
            store.release(queue, lease.consumer, tags, counted=counted, behind=verb == REQUEUE)
        else:
            reasons = [self._reason(done.tag) for done in batch]
            rejected = [
                (done.tag, done.id, reason, b"")
                for done, reason in zip(batch, reasons, strict=True)
            ]
            store.bury(queue, lease.consumer, rejected)
            for done in batch:
                self._unreadable.pop(done.tag, None)
                self._because.pop(done.tag, None)
        for done in batch:
            if self._done and self._done[0] is done:  # else a signal handler has flushed it
                self._recent.append(self._done.popleft())

    def _ack(self, store: Store, lease: Lease, queue: str, batch: list[Done]) -> None:
        # An ack may be sent twice: what is not held any more stays as it is.
        tags = [done.tag for done in batch]
        freed = [each for each in _first_alike(self._freed, _queue_of_freed) if each[0] == queue]

        def again() -> None:
            self._done.extend(batch)
            self._freed.extend(freed)

        store.ack(queue, lease.consumer, tags, again, [tag for _, tag in freed])
        self._have_told_freed(freed)

    def restore_unacked(self, client: Any = None) -> list[Any]:
        """Put all that was handed out back to the heads of its queues."""
        self._flush()
        self.release_failed()
        held, self._held = self._held, {}
        self._delivered.clear()
        self._done.extend(Done(GIVE_BACK, queue, tag, id) for tag, (queue, id) in held.items())
        self.channel.on_done()
        return []

    def forget(self) -> None:
        """Everything that was handed out belongs to others now: acks and rejects change nothing."""
        self._held.clear()
        self._done.clear()
        self._recent.clear()
        self._failed.clear()
        self._waiting.clear()
        self._unreadable.clear()
        self._because.clear()
        self._slots.clear()
        self._tasks.clear()
        self._freed.clear()
        self._freed_lately.clear()

    def queue_of(self, tag: int) -> str | None:
        """The queue of a message that was handed out and is held; None: it is not."""
        held = self._held.get(tag)
        return held and held[0]

    def failed(self, tag: int) -> None:
        """The program has raised on this message: should it end of it, that was an attempt."""
        self._failed.add(tag)

    def release_failed(self) -> None:
        """Put back, as an attempt, what the program has raised on and not acked."""
        for tag in self._failed & self._held.keys():
            queue, id = self._held.pop(tag)
            self._done.append(Done(RELEASE, queue, tag, id))
        self._failed.clear()

    def can_read(self, payload: dict[str, Any]) -> bool:
        """Whether Kombu can make a message of it."""
        try:
            self.channel.Message(payload, channel=self.channel)
        except Exception:  # bad base64, a missing member, a type that is none
            return False
        return True

    def took(self, tag: int) -> bool:
        """Whether a message has reached its consumer."""
        return tag in self._delivered

    def restore_unacked_once(self, stderr: Any = None) -> None:
        """At the channel's end, and at the process's: leave in good order."""
        self._on_collect.cancel()
        if self.channel.do_restore:
            self.channel.leave()
