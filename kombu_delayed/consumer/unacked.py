"""Unacknowledged messages of a channel, and the room that its prefetch limit leaves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sized
from time import monotonic
from typing import Any, Protocol

from kombu.transport import virtual

from ..message.envelope import REASON_LENGTH, UNREADABLE_BODY
from .lease.standstill import Unbegun
from .outbox import ACK, BURY, GIVE_BACK, RELEASE, REQUEUE, Done, Outbox
from .policy.slots import Slots

#: Messages claimed at once by a consumer without a prefetch limit in Kombu's event loop.
UNLIMITED_CLAIM = 50

LARGEST_CLAIM = 250

#: A claim for less than half of the prefetch limit waits so long for more room.
SMALL_CLAIM_SECONDS = 0.003


class Message(virtual.Message):
    """A message that, where its body cannot be decoded, becomes a dead letter when it is acked."""

    def _decode(self) -> Any:
        try:
            return super()._decode()
        except Exception as error:
            self.channel.qos.unreadable(self.delivery_tag, error)
            raise


def _nothing() -> None:
    pass


class Reserved:
    """The reserved messages of a channel, as Celery calls them, whose programs say when they begin.

    `queue_of` gives the queue of a message that was handed out and is held.
    """

    def __init__(self, queue_of: Callable[[int], str | None]) -> None:
        #: Their tags, and what is to be called if they go back.
        self.tags: dict[int, Callable[[], Any]] = {}
        #: The one that is being handed to its program just now, and whether it has gone back.
        self.in_hand: int | None = None
        self._has_gone = self._was_taken = False
        #: Queues whose programs say when they begin.
        self._say_when: set[str] = set()
        self._queue_of = queue_of

    def hand(self, tag: int, no_ack: bool = False) -> None:
        """A message is handed to its program, which may say that it does not begin yet."""
        self.in_hand, self._has_gone, self._was_taken = tag, False, no_ack

    def is_for_good(self, tag: int) -> bool:
        """Whether a message is the program's whatever happens: no ack is expected, or it is a copy.

        That of a fanout exchange comes another way.
        """
        return self._was_taken if tag == self.in_hand else self._queue_of(tag) is None

    def add(self, tag: int, on_return: Callable[[], Any] = _nothing) -> None:
        """The program calls `begin` before it begins on a message: until then it can go back.

        Then `on_return` is called, in whichever thread.
        """
        if tag == self.in_hand and self._has_gone:
            on_return()
        else:
            self.tags[tag] = on_return
        if (queue := self._queue_of(tag)) is not None:
            self._say_when.add(queue)
        self.in_hand = None

    def begin(self, tag: int) -> bool:
        """Whether the program may begin on a message that waits: it has not gone back."""
        return self.tags.pop(tag, None) is not None  # whichever thread does it decides

    def take(self, only: str | None = None) -> Iterator[tuple[int, str]]:
        """Take those of all queues, or of one, from their program: tags and queues, last first."""
        for tag in sorted(self.tags, reverse=True):
            queue = self._queue_of(tag)
            on_return = self.tags.pop(tag, None) if queue and only in (None, queue) else None
            if queue and on_return:
                on_return()
                yield tag, queue

    def take_of(self, queue: str) -> Iterator[tuple[int, str]]:
        """Take those of one queue, and the one that is being handed to its program."""
        if (tag := self.in_hand) is not None and queue in self._say_when:
            self._has_gone = self._queue_of(tag) == queue
            if self._has_gone:
                self.tags[tag] = _nothing
        return self.take(queue)


class QoS(virtual.QoS):
    """Counts what is outstanding, and puts acks and rejects into its outbox."""

    def __init__(self, channel: Any, prefetch_count: int = 0) -> None:
        super().__init__(channel, prefetch_count)
        self.outbox = Outbox()
        self.slots = Slots(self.outbox)
        self.reserved = Reserved(self.queue_of)
        #: Tags of messages that were or are about to be handed out -> their queues and ids.
        self.held: dict[int, tuple[str, str]] = {}
        self._failed: set[int] = set()
        self._unreadable: dict[int, str] = {}
        self._because: dict[int, str] = {}

    def took(self, tag: int) -> bool:
        """Whether a message has reached its consumer."""
        return tag in self._delivered

    def queue_of(self, tag: int) -> str | None:
        """The queue of a message that was handed out and is held; None: it is not."""
        held = self.held.get(tag)
        return held and held[0]

    def known_tags(self) -> set[int]:
        """Of messages that are held, have slots, or of which the server may not have heard yet."""
        return {*tuple(self.held), *tuple(self.slots.of_messages), *self.outbox.tags}

    def can_read(self, payload: dict[str, Any]) -> bool:
        """Whether Kombu can make a message of it."""
        try:
            self.channel.Message(payload, channel=self.channel)
        except Exception:  # bad base64, a missing member, a type that is none
            return False
        return True

    # What its program does with it.

    def ack(self, delivery_tag: Any) -> None:
        """The message was dealt with; one that could not be read is not gone for that."""
        self._finish(BURY if delivery_tag in self._unreadable else ACK, delivery_tag)

    def reject(self, delivery_tag: Any, requeue: bool = False) -> None:
        """Put the message back into its queue, behind what waits, or bury it."""
        self._finish(REQUEUE if requeue else BURY, delivery_tag)

    def _finish(self, verb: str, tag: Any) -> None:
        super().ack(tag)
        self.reserved.tags.pop(tag, None)
        held = self.held.pop(tag, None)
        if held is not None:
            queue, id = held
            reason = self._reason(tag) if verb == BURY else ""
            self.outbox.done.append(Done(verb, queue, tag, id, reason))
            if tag in self.slots.of_messages and tag not in self.slots.of_tasks:
                self.slots.free(tag)
            self.channel.on_done()

    def because(self, tag: int, reason: str) -> None:
        """Why a message is about to be rejected, for its dead letter."""
        self._because[tag] = reason[:REASON_LENGTH]

    def unreadable(self, tag: int, error: Exception) -> None:
        """The body of a message that was handed out cannot be decoded: it will be buried."""
        self._unreadable[tag] = f"{UNREADABLE_BODY}: {error}"[:REASON_LENGTH]

    def _reason(self, tag: int) -> str:
        because = self._because.pop(tag, None)
        return self._unreadable.pop(tag, None) or because or "rejected"

    def failed(self, tag: int) -> None:
        """The program has raised on this message: should it end of it, that was an attempt."""
        self._failed.add(tag)

    # What goes back without it.

    def give_back(self, queue: str, tags: Iterable[int]) -> None:
        """Messages that were claimed and not handed out return with the next flush."""
        for tag in tags:
            self.outbox.done.append(Done(GIVE_BACK, queue, tag, ""))
            self.slots.free(tag)

    def give_back_held(self, tag: int) -> None:
        """What was at work on the message was ended: it returns with the next flush."""
        queue = self.queue_of(tag)
        if queue is not None:
            super().ack(tag)
            self.reserved.tags.pop(tag, None)
            self.give_back(queue, [tag])
            self.held.pop(tag, None)

    def give_back_reserved(self, queue: str) -> None:
        """Messages that were handed out and not begun return with the next flush."""
        for tag, _ in self.reserved.take_of(queue):
            self.give_back_held(tag)

    def take_reserved(self) -> list[Unbegun]:
        """Take messages that were handed out and not begun from their program. From any thread."""
        found = []
        for tag, queue in self.reserved.take():
            super().ack(tag)
            self.held.pop(tag, None)
            found.append(Unbegun(queue, tag, self.slots.take_over(tag)))
        return found

    def release_failed(self) -> None:
        """Put back, as an attempt, what the program has raised on and not acked."""
        for tag in self._failed & self.held.keys():
            queue, id = self.held.pop(tag)
            self.outbox.done.append(Done(RELEASE, queue, tag, id))
        self._failed.clear()

    def restore_unacked(self, client: Any = None) -> list[Any]:
        """Put all that was handed out back to the heads of its queues."""
        self._flush()
        self.release_failed()
        held, self.held = self.held, {}
        self._delivered.clear()
        self.outbox.done.extend(
            Done(GIVE_BACK, queue, tag, id) for tag, (queue, id) in held.items()
        )
        self.channel.on_done()
        return []

    def restore_unacked_once(self, stderr: Any = None) -> None:
        """At the channel's end, and at the process's: leave in good order."""
        self._on_collect.cancel()
        if self.channel.do_restore:
            self.channel.leave()

    def forget(self) -> None:
        """Everything that was handed out belongs to others now: acks and rejects change nothing."""
        self.held.clear()
        self.slots.forget()
        self.outbox.forget()
        self._failed.clear()
        self.reserved.tags.clear()
        self._unreadable.clear()
        self._because.clear()


class Share(Protocol):
    """What one server of several has of a prefetch limit."""

    wanting: int
    elsewhere: int
    is_polled: bool


class Room:
    """For how many messages of one server there is room, and whether these are worth a call.

    `claimed` are those that were not handed out yet; for one that is `asked` for there is no room.
    """

    def __init__(self, qos: QoS, share: Share, claimed: Sized, asked: Sized) -> None:
        #: When the last claim was sent.
        self.last_at = -math.inf
        #: Whether messages were outstanding when the room was last counted, of a limited one.
        self.is_used = False
        self._qos = qos
        self._share = share
        self._claimed = claimed
        self._asked = asked

    def count(self) -> int:
        """How many messages may be claimed."""
        if self._asked:
            return 0
        if "can_consume" in self._qos.__dict__:  # by Celery's worker_disable_prefetch: one by one
            room = int(not self._claimed and self._qos.can_consume())
        elif not self._qos.prefetch_count:
            # Who drains events one by one may be at work on each of them: others wait for the rest.
            most = UNLIMITED_CLAIM if self._share.is_polled else 1
            room = 0 if self._claimed else most
        else:
            # What was handed out, but for what was acked.
            outstanding = len(self._qos._delivered) - len(self._qos._dirty)
            self.is_used = outstanding > 0
            room = self._qos.prefetch_count - outstanding - len(self._claimed)
        return max(min(room, LARGEST_CLAIM) - self._share.elsewhere, 0)

    def worth_claiming(self, room: int, now: float) -> int:
        """How many to ask for where there is `room`; 0: it is worth no call yet."""
        most = min(self._qos.prefetch_count, LARGEST_CLAIM)
        is_small = room < most // 2 and "can_consume" not in self._qos.__dict__
        if is_small and now - self.last_at < SMALL_CLAIM_SECONDS:
            return 0
        return -(-room // max(self._share.wanting, 1))

    def small_at(self) -> float:
        """When a claim for little room is worth a call."""
        return self.last_at + SMALL_CLAIM_SECONDS

    def worth_at(self) -> float:
        """From when on a claim for the room that there is now is worth a call."""
        return -math.inf if self.worth_claiming(self.count(), monotonic()) else self.small_at()
