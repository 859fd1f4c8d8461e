"""The consumer of one channel: a state machine that waits for messages and delivers them.

A wake token says that messages can be claimed, now or at a given time. A consumer blocks for tokens
on one connection and claims on another. A consumer that takes a token follows it or passes it on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING, Any

from ..connection.native import get_logger
from ..errors import UNREACHABLE, AccessDenied, FormatError
from ..store.global_limits import is_pool
from .claiming.sources import Source
from .lease.standstill import Progress, Unbegun
from .outliving_tasks import Remaining, remain
from .part import Part
from .policy.admission import Claimed

if TYPE_CHECKING:
    from ..connection.wakeup import WakeConnection
    from .lease.lease import Lease
    from .session import Session

logger = get_logger(__name__)

#: After these errors others take over what this consumer holds, once its lease has expired.
_CANNOT_LEAVE: tuple[type[BaseException], ...] = (*UNREACHABLE, FormatError, AccessDenied)


class Consumer:
    """Consumes the queues of one server, with a single part."""

    #: After it was closed: the tasks that still run.
    remaining: Remaining | None = None

    #: The thread that gets single messages; None during a `get`, or if there is no such thread.
    _getting_in: int | None = None

    def __init__(self, session: Session, *wakes: WakeConnection) -> None:
        self.session = session
        self.store = session.store
        self.store.run.is_consumers = True
        self.parts = [Part(session, wake) for wake in wakes]
        self.progress = Progress(
            self.lease.seconds,
            self.lease.clock,
            self.take_back,
            session.qos.slots.shared.report_taken_back,
            lambda: tuple(self.sources),
        )
        session.parts, session.progress = self.parts, self.progress
        self.lease.progress = self.progress
        #: Queues without a lease in which the server may still know this consumer.
        self._left: set[str] = set()

    @property
    def lease(self) -> Lease:
        """The lease on its messages. If it is lost, another one with another name replaces it."""
        return self.session.lease

    @property
    def sources(self) -> Mapping[str, Source]:
        """The queues that it consumes."""
        return self.parts[0].claims.sources

    def _part(self, queue: str) -> Part:
        return self.parts[0]

    def add(self, queue: str, no_ack: bool, expires_ms: int) -> None:
        """Consume a queue from now on."""
        self._part(queue).add(queue, no_ack, expires_ms)

    def remove(self, queue: str) -> None:
        """Stop consuming a queue: messages that were not handed out or not started go back."""
        self._part(queue).remove(queue)

    def leave_unused(self) -> None:
        """End the lease in queues that it does not consume any more and where it holds nothing.

        Else a program that visits many queues in its life renews it in all of them. Raises
        UNREACHABLE.
        """
        if not (self._unused() or self._left):
            return
        self.session.qos.outbox.settle(self.store, self.lease)  # an ack may have failed
        for queue in self._unused():
            self.lease.forget(queue)
            self._left.add(queue)
        self._left -= self.lease.queues  # it has come back meanwhile
        errors = self.store.leases.leave_all([*self._left], self.lease.consumer, lambda _: ())
        self._left &= errors.keys()

    def _unused(self) -> set[str]:
        claims = [part.claims for part in tuple(self.parts)]
        used = {*self.sources, *self.session.qos.queues}
        used |= {queue for each in claims for queue in each.unsure}
        used |= {entry.queue for each in claims for entry in tuple(each.buffer)}
        return {each for each in self.lease.queues - used if not is_pool(each)}

    def hold(self, queue: str) -> None:
        """Give back at once the messages of a paused queue's shards that have not started."""
        for shard in [name for name, source in self.sources.items() if source.whole == queue]:
            self._part(shard).hold(shard)

    def take_back(self) -> list[Unbegun]:
        """Take away the claimed messages that have not started. Safe from any thread."""
        found = self.session.qos.take_reserved()
        return found + [each for part in tuple(self.parts) for each in part.claims.take_back()]

    def close(self) -> None:
        """Stop, and leave what is still unacked to other consumers. Safe to call twice."""
        lease, qos = self.lease, self.session.qos
        queues = {*self.sources, *lease.queues, *self._left}
        for part in tuple(self.parts):
            part.claims.drop_all()
        lease.end()
        for part in tuple(self.parts):
            part.stop()
        for queue in qos.slots.queues_of_tasks():
            qos.give_back_reserved(queue)  # started tasks continue
        kept = self._leave(queues)
        self.remaining = remain(lease, queues, qos, kept) or self.remaining

    def _leave(self, queues: set[str]) -> Collection[str]:
        """Give back what is not acked and not running; returns the queues it could not reach."""
        failed: BaseException | None = None
        for _ in range(2):  # the old connection may be long closed although the broker is up
            try:
                for error in self.session.leave(queues).values():
                    raise error
                return ()
            except _CANNOT_LEAVE as error:
                failed = error
        logger.warning(
            "Consumer %s stops without the broker (%s): its unacknowledged messages return to "
            "their queues when this process reaches it again, and within %g seconds at most",
            self.lease.consumer,
            failed,
            self.lease.seconds,
        )
        return () if isinstance(failed, FormatError) else queues

    @property
    def wakes(self) -> list[WakeConnection]:
        """The connections on which it waits for tokens."""
        return [part.wake for part in self.parts]

    @property
    def idle(self) -> bool:
        """Whether it neither claims nor waits, because it had no room when it last could."""
        return any(part.idle for part in self.parts)

    def step(self) -> float:
        """Do what is due; returns when to come back, by the monotonic clock."""
        run = self.store.run
        if monotonic() >= run.look_at:
            run.look()  # acks that were refused or lost are sent with the next ones
        shared = self.session.qos.slots.shared
        if shared.pools:
            room = self._room() if monotonic() >= self._claim_at() else 0
            shared.step(self.session, room, self._make_ready)
        next_at = min(self._step_parts(), run.look_at)
        if shared.pools:
            at = shared.next_at(self.session, self._room())
            next_at = min(next_at, max(at, self._claim_at()))
        return next_at

    def _room(self) -> int:
        return max((part.claims.room.count() for part in tuple(self.parts)), default=0)

    def _claim_at(self) -> float:
        """When a claim is worth a call for every part. Slots of global limits are taken first."""
        return max((part.claims.room.worth_at() for part in tuple(self.parts)), default=0.0)

    def _make_ready(self, queue: str) -> bool:
        """Note that a queue may have slots; returns whether this consumer claims from it now."""
        source = self.sources.get(queue)
        if source is None or self._room() <= 0:
            return False
        source.ready = True
        return True

    def _step_parts(self) -> float:
        return self.parts[0].step()

    @property
    def is_full(self) -> bool:
        """Whether a step has nothing to do: no room, all handed out, and the outbox is empty."""
        qos = self.session.qos
        if qos.can_consume() or qos.outbox.has_any:
            return False
        return not any(part.claims.buffer for part in self.parts)

    @property
    def has_messages(self) -> bool:
        """Whether claimed messages can be handed out."""
        parts = self.parts
        return any(part.claims.buffer and monotonic() >= part.retry.hold_until for part in parts)

    def hand_out(self) -> bool:
        """Give one claimed message to its consumer; returns whether there was one."""
        return self.parts[0].hand_out()

    def hurry(self) -> None:
        """Retry at once, because the broker may be back. Safe from any thread."""
        for part in tuple(self.parts):
            part.retry.hurry()

    def get(
        self, queue: str, no_ack: bool, expires_ms: int = 0
    ) -> tuple[dict[str, Any], bytes] | None:
        """Claim one message without waiting; returns it with its record, or None."""
        self._getting_in = None
        try:
            return self._part(queue).get(queue, no_ack, expires_ms)
        finally:
            self._getting_in = get_ident()

    def give_back_slots(self) -> None:
        """Give back slots of global limits at once in a program that only gets single messages.

        No loop does it there. Only the thread that gets may do it: another one could do so in the
        middle of a claim.
        """
        shared = self.session.qos.slots.shared
        if shared.pools and self._getting_in == get_ident() and not self.sources:
            shared.step(self.session, 0, lambda _: False)

    def refuse(self, queue: str, tag: int, record: bytes, error: Exception, no_ack: bool) -> None:
        """Bury a message whose body cannot be read, or which its consumer cannot accept."""
        self._part(queue).opener.refuse(Claimed(queue, tag, record), error, no_ack)
