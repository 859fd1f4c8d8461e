"""Unacknowledged messages of a channel: acks in batches, rejects one by one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from itertools import islice, takewhile
from typing import Any, NamedTuple

from kombu.transport import virtual

from .lease import Lease
from .message import REASON_LENGTH, UNREADABLE_BODY
from .store import CALL_LIMIT, Store

#: What to do with a held message that its consumer is done with.
ACK, RELEASE, GIVE_BACK, BURY = "ack", "release", "give back", "bury"


class Done(NamedTuple):
    """A message that its consumer is done with, and what is to become of it."""

    verb: str
    queue: str
    tag: int
    id: str


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
        #: Tags of messages that their program has not begun, and says so when it does.
        self._waiting: set[int] = set()
        self._flushing = threading.RLock()  # for a signal handler, in the moment before `_flusher`
        self._flusher: int | None = None

    @property
    def outstanding(self) -> int:
        """How many messages were handed out and not acked."""
        return len(self._delivered) - len(self._dirty)

    def received(self, tag: int, queue: str, id: str) -> None:
        """A message is about to be handed out."""
        self._held[tag] = queue, id

    def ack(self, delivery_tag: Any) -> None:
        """The message was dealt with; one that could not be read is not gone for that."""
        self._finish(BURY if delivery_tag in self._unreadable else ACK, delivery_tag)

    def reject(self, delivery_tag: Any, requeue: bool = False) -> None:
        """Put the message back to the head of its queue, or bury it."""
        self._finish(RELEASE if requeue else BURY, delivery_tag)

    def wait(self, tag: int) -> None:
        """The program calls `begin` before it begins on a message: until then it can go back."""
        self._waiting.add(tag)

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
            self.channel.on_done()

    def unreadable(self, tag: int, error: Exception) -> None:
        """The body of a message that was handed out cannot be decoded: it will be buried."""
        self._unreadable[tag] = f"{UNREADABLE_BODY}: {error}"[:REASON_LENGTH]

    def give_back(self, queue: str, tags: Iterable[int]) -> None:
        """Messages that were claimed and not handed out return with the next flush."""
        self._done.extend(Done(GIVE_BACK, queue, tag, "") for tag in tags)

    def give_back_waiting(self, queue: str) -> None:
        """Messages that were handed out and not begun return with the next flush."""
        for tag in sorted(self._waiting, reverse=True):
            if self.queue_of(tag) == queue and self.begin(tag):
                super().ack(tag)
                self.give_back(queue, [tag])
                self._held.pop(tag, None)

    def flush(self, store: Store, lease: Lease) -> None:
        """Tell the server of acks and rejects. What fails stays for the next time."""
        if self._flusher == threading.get_ident():
            return  # a signal handler has interrupted this very flush, which goes on afterwards
        with self._flushing:
            self._flusher = threading.get_ident()
            try:
                self._flush_done(store, lease)
            finally:
                self._flusher = None

    def settle(self, store: Store, lease: Lease) -> None:
        """Flush and wait for the answers; what the server has refused once is tried once more."""
        for _ in range(2):
            self.flush(store, lease)
            store.run.settle()

    def _flush_done(self, store: Store, lease: Lease) -> None:
        while self._done:
            verb, queue = self._done[0][:2]
            batch = self._next_batch(verb, queue)
            if verb == ACK:
                self._ack(store, lease, queue, batch)
            elif verb in (RELEASE, GIVE_BACK):
                tags = [done.tag for done in batch]
                store.release(queue, lease.consumer, tags, counted=verb == RELEASE)
            else:
                reasons = [self._unreadable.get(done.tag, "rejected") for done in batch]
                rejected = [
                    (done.tag, done.id, reason, b"")
                    for done, reason in zip(batch, reasons, strict=True)
                ]
                store.bury(queue, lease.consumer, rejected)
                for done in batch:
                    self._unreadable.pop(done.tag, None)
            for _ in batch:
                self._done.popleft()

    def _next_batch(self, verb: str, queue: str) -> list[Done]:
        same = takewhile(lambda done: done[:2] == (verb, queue), tuple(self._done))
        return list(islice(same, CALL_LIMIT))

    def _ack(self, store: Store, lease: Lease, queue: str, batch: list[Done]) -> None:
        # An ack may be sent twice: what is not held any more stays as it is.
        tags = [done.tag for done in batch]
        store.ack(queue, lease.consumer, tags, on_error=lambda: self._done.extend(batch))

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
        self._failed.clear()
        self._waiting.clear()
        self._unreadable.clear()

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
