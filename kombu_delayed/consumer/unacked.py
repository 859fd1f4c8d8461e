"""Unacknowledged messages of a channel, and the room that its prefetch limit leaves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sized
from time import monotonic
from typing import Any, Protocol

from kombu.exceptions import ContentDisallowed, DecodeError
from kombu.transport import virtual

from ..message.envelope import REASON_LENGTH, UNREADABLE_BODY, check_body, escaped
from .lease.standstill import Unbegun
from .outbox import ACK, BURY, GIVE_BACK, RELEASE, REQUEUE, Done, Outbox
from .policy.slots import Slots

#: Messages claimed at once by a consumer without a prefetch limit in Kombu's event loop.
UNLIMITED_CLAIM = 50

LARGEST_CLAIM = 250

#: A claim for less than half of the prefetch limit waits this long for more room.
SMALL_CLAIM_SECONDS = 0.003

#: The member of a payload that is handed to a worker of Celery.
FOR_CELERY = "for_celery"

#: The member of a payload that was taken without ack emulation: the queue or shard it came from.
TAKEN_FROM = "taken_from"


class Message(virtual.Message):
    """A message that becomes a dead letter when it is acked, if its body cannot be decoded."""

    def _decode(self) -> Any:
        try:
            found = super()._decode()
            if FOR_CELERY in self._raw:
                check_body(self.headers, found)
            return found
        except Exception as error:
            self.channel.qos.unreadable(self.delivery_tag, error)
            if FOR_CELERY in self._raw and not isinstance(error, (DecodeError, ContentDisallowed)):
                raise DecodeError(repr(error)) from error  # others would stop a worker
            raise


def _nothing() -> None:
    pass


class Reserved:
    """The messages of a channel that Celery calls reserved: their programs say when they begin.

    `queue_of` returns the queue of a message that was handed out and is held.
    """

    def __init__(self, queue_of: Callable[[int], str | None]) -> None:
        #: Tag of a message -> what to call if the message goes back.
        self.tags: dict[int, Callable[[], Any]] = {}
        #: The message that is being handed to its program, whether it has gone back, and whether
        #: it was taken without acks.
        self.in_hand: int | None = None
        self._has_gone = self._was_taken = False
        #: Queues whose programs say when they begin.
        self._say_when: set[str] = set()
        self._queue_of = queue_of

    def hand(self, tag: int, no_ack: bool = False) -> None:
        """Note that a message is handed to its program, which may say that it begins later."""
        self.in_hand, self._has_gone, self._was_taken = tag, False, no_ack

    def is_for_good(self, tag: int) -> bool:
        """Whether a message cannot go back: it needs no ack, or is a copy from a fanout exchange.

        Such a copy comes another way, and is not held.
        """
        return self._was_taken if tag == self.in_hand else self._queue_of(tag) is None

    def add(self, tag: int, on_return: Callable[[], Any] = _nothing) -> None:
        """Add a message whose program calls `begin` before it starts it; until then it can go back.

        If it goes back, `on_return` is called, in any thread.
        """
        if tag == self.in_hand and self._has_gone:
            on_return()
        else:
            self.tags[tag] = on_return
        if (queue := self._queue_of(tag)) is not None:
            self._say_when.add(queue)
        self.in_hand = None

    def begin(self, tag: int) -> bool:
        """Whether the program may begin on a message, because it has not gone back."""
        return self.tags.pop(tag, None) is not None  # the first thread to do so decides

    def take(self, only: str | None = None) -> Iterator[tuple[int, str]]:
        """Take messages of all queues, or of one, away; yields tags and queues, last ones first."""
        for tag in sorted(self.tags, reverse=True):
            queue = self._queue_of(tag)
            on_return = self.tags.pop(tag, None) if queue and only in (None, queue) else None
            if queue and on_return:
                on_return()
                yield tag, queue

    def take_of(self, queue: str) -> Iterator[tuple[int, str]]:
        """Take messages of one queue away, also the one that is being handed to its program."""
        if (tag := self.in_hand) is not None and queue in self._say_when:
            self._has_gone = self._queue_of(tag) == queue
            if self._has_gone:
                self.tags[tag] = _nothing
        return self.take(queue)


class QoS(virtual.QoS):
    """Counts outstanding messages, and puts acks and rejects into its outbox."""

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
        """The queue of a message that was handed out and is held; None if it is not held."""
        held = self.held.get(tag)
        return held and held[0]

    @property
    def queues(self) -> set[str]:
        """The queues of messages that are held, have slots, or are still to be acked."""
        held = {queue for queue, _ in tuple(self.held.values())}
        with_slots = {queue for queue, _ in tuple(self.slots.of_messages.values())}
        return held | with_slots | self.outbox.queues

    def known_tags(self) -> set[int]:
        """Tags of messages that are held, have slots, or whose acks the server may not know."""
        return {*tuple(self.held), *tuple(self.slots.of_messages), *self.outbox.tags}

    def can_read(self, payload: dict[str, Any]) -> bool:
        """Whether Kombu can make a message of a payload."""
        try:
            self.channel.Message(payload, channel=self.channel)
        except Exception:  # bad base64, a missing member, a wrong type
            return False
        return True

    def can_decode(self, payload: dict[str, Any]) -> bool:
        """Whether a program can read a message of a payload, and its body."""
        try:
            message = self.channel.Message(payload, channel=self.channel)
            message.decode()
        except Exception:
            return False
        return not message.errors

    # The program's calls for a message.

    def ack(self, delivery_tag: Any) -> None:
        """Acknowledge a message. One whose body could not be read is buried, not lost."""
        self._finish(BURY if delivery_tag in self._unreadable else ACK, delivery_tag)

    def reject(self, delivery_tag: Any, requeue: bool = False) -> None:
        """Put the message back into its queue, behind the waiting ones, or bury it."""
        if requeue and not self.channel.ack_emulation:
            self._send_again(delivery_tag)
        self._finish(REQUEUE if requeue else BURY, delivery_tag)

    def _send_again(self, *tags: Any) -> None:
        """Send messages again that were taken for good when they were handed out."""
        for message in filter(None, map(self._delivered.get, tags)):
            self.channel.send_again(message._raw)

    def _finish(self, verb: str, tag: Any) -> None:
        super().ack(tag)
        self.reserved.tags.pop(tag, None)
        held = self.held.pop(tag, None)
        if held is not None:
            queue, id = held
            reason = "" if verb == ACK else self._reason(tag)
            self.outbox.done.append(Done(verb, queue, tag, id, reason))
            if tag in self.slots.of_messages:
                self.slots.message_ended(tag)
            self.channel.on_done()

    def because(self, tag: int, reason: str) -> None:
        """Note why a message is about to be rejected, for its dead letter."""
        if tag in self.held:
            self._because[tag] = reason[:REASON_LENGTH]

    def unreadable(self, tag: int, error: Exception) -> None:
        """Note that the body of a message cannot be decoded, so that it will be buried."""
        if tag in self.held:  # not one that was taken without acks, or came by fanout
            self._unreadable[tag] = f"{UNREADABLE_BODY}: {error}"[:REASON_LENGTH]

    def _reason(self, tag: int) -> str:
        because = self._because.pop(tag, None)
        reason = self._unreadable.pop(tag, None) or because or "rejected"
        return escaped(reason)

    def failed(self, tag: int) -> None:
        """Note that the program raised on a message: if it ends by that, this was an attempt."""
        self._failed.add(tag)
        self._failed &= self.held.keys()

    # Messages that go back without the program.

    def give_back(self, queue: str, tags: Iterable[int]) -> None:
        """Return messages that were claimed and not handed out, with the next flush."""
        for tag in tags:
            self.outbox.done.append(Done(GIVE_BACK, queue, tag, ""))
            self.slots.free(tag)

    def give_back_held(self, tag: int) -> None:
        """Return a message whose work was stopped, with the next flush."""
        queue = self.queue_of(tag)
        if queue is not None:
            super().ack(tag)
            self.reserved.tags.pop(tag, None)
            self.give_back(queue, [tag])
            self.held.pop(tag, None)

    def give_back_reserved(self, queue: str) -> None:
        """Return messages that were handed out and not started, with the next flush."""
        for tag, _ in self.reserved.take_of(queue):
            self.give_back_held(tag)

    def take_reserved(self) -> list[Unbegun]:
        """Take away messages that were handed out and not started. Safe from any thread."""
        found = []
        for tag, queue in self.reserved.take():
            super().ack(tag)
            self.held.pop(tag, None)
            found.append(Unbegun(queue, tag, self.slots.take_over(tag)))
        return found

    def release_failed(self) -> None:
        """Put back messages the program raised on and did not ack. Each counts as an attempt."""
        for tag in self._failed & self.held.keys():
            queue, id = self.held.pop(tag)
            self.outbox.done.append(Done(RELEASE, queue, tag, id))
            self.slots.message_ended(tag)
        self._failed.clear()

    def restore_unacked(self, client: Any = None) -> list[Any]:
        """Put all messages that were handed out back at the heads of their queues."""
        self._flush()
        self.release_failed()
        held, self.held = self.held, {}
        if not self.channel.ack_emulation:
            self._send_again(*self._delivered)
        self._delivered.clear()
        for tag, (queue, id) in held.items():
            self.outbox.done.append(Done(GIVE_BACK, queue, tag, id))
            self.slots.message_ended(tag)
        self.channel.on_done()
        return []

    def restore_unacked_once(self, stderr: Any = None) -> None:
        """Leave in good order when the channel or the process ends."""
        self._on_collect.cancel()
        if self.channel.do_restore:
            self.channel.leave()

    def forget(self) -> None:
        """Forget all messages: others have them now, so acks and rejects must change nothing."""
        self.held.clear()
        self.slots.forget()
        self.outbox.forget()
        self._failed.clear()
        self.reserved.tags.clear()
        self._unreadable.clear()
        self._because.clear()


class Share(Protocol):
    """The share that one of several servers has of a prefetch limit."""

    wanting: int
    elsewhere: int
    is_polled: bool


class Room:
    """Counts for how many messages of one server there is room, and if they are worth a call.

    `claimed` has the messages that were not handed out yet. While a claim is in `asked`, there is
    no room.
    """

    def __init__(self, qos: QoS, share: Share, claimed: Sized, asked: Sized) -> None:
        #: When the last claim was sent.
        self.last_at = -math.inf
        #: Whether messages were outstanding at the last count, if there is a prefetch limit.
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
            # A program that drains events one by one may work on each: leave the rest to others.
            most = UNLIMITED_CLAIM if self._share.is_polled else 1
            room = 0 if self._claimed else most
        else:
            # Handed out and not acked.
            outstanding = len(self._qos._delivered) - len(self._qos._dirty)
            self.is_used = outstanding > 0
            room = self._qos.prefetch_count - outstanding - len(self._claimed)
        return max(min(room, LARGEST_CLAIM) - self._share.elsewhere, 0)

    def worth_claiming(self, room: int, now: float) -> int:
        """How many messages to claim if there is `room`; 0 if that is not worth a call yet."""
        most = min(self._qos.prefetch_count, LARGEST_CLAIM)
        is_small = room < most // 2 and "can_consume" not in self._qos.__dict__
        if is_small and now - self.last_at < SMALL_CLAIM_SECONDS:
            return 0
        return -(-room // max(self._share.wanting, 1))

    def small_at(self) -> float:
        """When a claim for little room is worth a call."""
        return self.last_at + SMALL_CLAIM_SECONDS

    def worth_at(self) -> float:
        """From when on a claim for the present room is worth a call."""
        return -math.inf if self.worth_claiming(self.count(), monotonic()) else self.small_at()
