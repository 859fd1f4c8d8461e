"""The part of a consumer on one server: waits for wake tokens, claims, hands out."""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from time import monotonic
from typing import TYPE_CHECKING, Any

from ..connection.cluster.connection import SlotMoves
from ..connection.native import get_logger
from ..errors import UNREACHABLE, LeaseLost
from ..store.global_limits import is_pool
from .claiming.claims import Claims
from .claiming.sources import AUTO_DELETE, MOVING_SECONDS, POLL_JITTER, Source
from .opening import Opener
from .outbox import RELEASE, Done, Freed
from .policy.admission import Claimed
from .retrying import Retry
from .session import Session

if TYPE_CHECKING:
    from ..connection.wakeup import WakeConnection

logger = get_logger(__name__)

#: When to look for a claim that has reached the server after its connection was lost, in seconds:
#: a network may deliver it minutes later.
LATE_SECONDS = (5.0, 30.0, 120.0, 600.0)

#: A program that takes longer over a message runs its tasks in the thread that waits for messages.
BLOCKING_SECONDS = 0.1

#: A program that was quick this many times in a row does not; after a slow run it takes this many
#: more.
QUICK_RUNS, QUICK_AGAIN = 3, 50

#: After a failed attempt to wake other consumers, no other is made for this long.
SILENT_SECONDS = 1.0

#: Before a message that was claimed longer ago is handed out, check whether its queue is paused.
PAUSE_SECONDS = 1.0


class Part:
    """Claims messages of its queues in batches and hands them out one by one."""

    def __init__(self, session: Session, wake: WakeConnection) -> None:
        self.session = session
        self.wake = wake
        self.claims = Claims(session, wake)
        self.opener = Opener(session, self.claims.clock)
        self.retry = Retry(session.qos)
        self.patience_seconds = session.patience_seconds
        self._qos = session.qos
        #: Changes with each new connection, and each time the server has lost the lease.
        self._compared_over = 0
        #: When to compare again, because a lost claim may arrive late.
        self.compare_at: tuple[float, ...] = ()
        self._silent_until = -math.inf

    def add(self, queue: str, no_ack: bool, expires_ms: int) -> None:
        """Consume a queue from now on."""
        source = Source(queue, no_ack, expires_ms)
        if no_ack:  # nobody would ack what was claimed before
            self.claims.give_back_unbegun(queue)
        if expires_ms == AUTO_DELETE:
            self.session.lease.auto_delete.add(queue)
        self.claims.take_over(source)
        source.claim_anew()
        if self.wake.waiting:
            self._stop_waiting()

    def remove(self, queue: str) -> None:
        """Stop consuming a queue: messages that were not handed out or not started go back."""
        claims = self.claims
        if queue not in claims.sources:
            return
        claims.give_back_unbegun(queue)
        claims.buffer.take_out_of(queue)
        claims.let_go(queue)  # last: a signal handler may end this half way
        self._announce(queue)

    def _announce(self, queue: str) -> None:
        """Let others claim from a queue, unless the server has just been out of reach.

        Each try may take as long as the timeout of a socket, and a consumer that stops may have a
        thousand queues.
        """
        if monotonic() < self._silent_until:
            return
        try:
            self.claims.announce(queue)
        except UNREACHABLE as error:
            if not isinstance(error, SlotMoves):  # of this queue only
                self._silent_until = monotonic() + SILENT_SECONDS
            logger.info("Other consumers of queue %r will only notice by polling: %s", queue, error)

    def hold(self, queue: str) -> None:
        """Give back at once the messages of a queue that have not started."""
        self.claims.give_back_unbegun(queue)
        self._qos.outbox.flush(self.session.store, self.session.lease)

    def stop(self) -> None:
        """Stop claiming and waiting."""
        self.claims.drop_all()
        self.wake.close()
        self.claims.buffer.clear()

    def forget(self) -> None:
        """Forget the claimed messages, because they belong to other consumers now."""
        self.claims.buffer.clear()
        self.claims.unsure.clear()
        self.claims.pending.clear()
        self._stop_waiting()

    def _stop_waiting(self) -> None:
        """Claim from all queues, or let others, because a token in flight may get lost."""
        self.wake.reset()
        for source in tuple(self.claims.sources.values()):
            source.claim_anew()

    @property
    def idle(self) -> bool:
        """Whether it neither claims nor waits, because it had no room when it last could."""
        if self.claims.pending or not self.claims.listened:
            return False
        return not self.wake.waiting or bool(self.claims.agenda.ready)

    # The step: what is due now, and when to come back.

    def step(self) -> float:
        """Do what is due; returns when to come back, by the monotonic clock."""
        now, retry = monotonic(), self.retry
        if now < retry.at and now < (retry_at := retry.next_at):
            return retry_at
        try:
            self._step(now)
        except UNREACHABLE as error:
            return self._broken(error)
        if retry.broken_since is not None:
            self._mended()
        latest, outbox = self.wake.overdue_at, self._qos.outbox
        if outbox.freed:
            latest = min(latest, outbox.free_at)
        if self._qos.slots.of_messages:  # a server may lose slots while nothing else happens
            latest = min(latest, now + self.session.lease.seconds / 3)
        if now < retry.hold_until:
            latest = min(latest, retry.hold_until)
        return self.claims.next_at(min((latest, *self.compare_at[:1])))

    def _step(self, now: float) -> None:
        session, claims = self.session, self.claims
        if session.lease.lost:
            raise LeaseLost
        if claims.pending and not claims.finish(now):
            return
        if self.wake.overdue_at != math.inf and self.wake.check(now):
            self._stop_waiting()
        claims.agenda.spread = random.uniform(POLL_JITTER, 1.0)
        run, outbox = session.store.run, self._qos.outbox
        run.hold_back()  # acks go with the claim that follows
        try:
            slots_wait = not (session.runs_here or claims.gates.was_short)
            can_wait = outbox.done and not outbox.held
            if outbox.freed:
                can_wait = can_wait and slots_wait and now < outbox.free_at
            is_new = run.generation != outbox.sent_over
            has_any = outbox.done or outbox.freed or outbox.held or is_new
            if has_any and not (can_wait and claims.comes_soon(now)):
                outbox.flush(session.store, session.lease, slots_wait)
            over = outbox.sent_over + session.lease.outlasted
            if claims.unsure or self.compare_at or self._compared_over != over:
                self._recover(now)
            claims.claim_wanted(now)
        finally:
            run.push()
        if not claims.buffer and claims.room.count():
            listened = claims.listened if claims.gates.refused else claims.sources
            if len(claims.agenda.ready) < len(listened):
                self.wake.start(listened)

    def _recover(self, now: float) -> None:
        """Find messages of lost answers, and correct a server that has lost data."""
        claims, outbox = self.claims, self._qos.outbox
        if claims.unsure:
            claims.recover_all()
            self.compare_at = tuple(now + seconds for seconds in LATE_SECONDS)
        if self.compare_at and now >= self.compare_at[0]:
            self.compare_at, self._compared_over = self.compare_at[1:], -1
        if self._compared_over != (over := outbox.sent_over + self.session.lease.outlasted):
            self._compare(over)

    def _compare(self, over: int) -> None:
        """Correct the server if it has lost data since the last step, or has older data."""
        session, claims = self.session, self.claims
        if session.tag:  # else it has claimed nothing yet
            tags = [*(each.tag for each in tuple(claims.buffer)), *session.progress.taken]
            self._correct(self._known_queues() - claims.unsure.keys(), tags)
            self._qos.outbox.flush(session.store, session.lease)
        self._compared_over = over

    def _known_queues(self) -> frozenset[str]:
        """The queues whose messages it may hold, even if it does not consume them any more."""
        queues = self.session.lease.queues
        return queues - {queue for queue in queues if is_pool(queue)}

    def _correct(self, queues: Collection[str], claimed: Collection[int]) -> None:
        """Correct the server for queues of which every answer has arrived.

        A server that was restarted from an older snapshot says that messages are held that were
        acknowledged since. One that has lost its data has lost the slots of running tasks. One that
        has got a claim late says that messages are held that this consumer has never received.
        `claimed` has the tags of messages that were not handed out, or that were taken back since.
        Corrections for messages that are not held any more go into the outbox.
        """
        qos, leases, consumer = self._qos, self.session.store.leases, self.session.lease.consumer
        last_tag, before = self.session.tag, qos.known_tags()
        found = leases.tags(queues, consumer)
        known = {*claimed, *before, *qos.known_tags()}  # any thread may have acked meanwhile
        for queue, (tags, with_slots) in found.items():
            if stale := sorted(tag for tag in tags - known if tag <= last_tag):
                logger.warning(
                    "The server has older data, or has got a claim late: %d messages of queue %r "
                    "that this consumer has acknowledged, or not received, run again",
                    len(stale),
                    queue,
                )
                qos.outbox.done.extend(Done(RELEASE, queue, tag, "") for tag in stale)
            ended = (tag for tag in with_slots - known if tag <= last_tag)
            qos.outbox.freed.extend(Freed(queue, tag) for tag in ended)
            gate = self.claims.gates.gate(queue)
            if gate is not None and (lost := qos.slots.kept(queue, gate, with_slots)):
                leases.keep_slots(queue, consumer, lost)
                # Slots of tasks that have ended meanwhile are freed once more.
                qos.outbox.freed.extend(
                    Freed(queue, tag) for tag, *_ in lost if tag not in qos.slots.of_messages
                )

    def _broken(self, error: BaseException) -> float:
        if isinstance(error, SlotMoves):  # the node has answered
            self._mended()
            return monotonic() + MOVING_SECONDS
        self._stop_waiting()
        if isinstance(error, LeaseLost):
            self.session.start_anew()
            raise error
        return self.retry.failed(error, self.patience_seconds)

    def _mended(self) -> None:
        self.retry.mended()

    def take_token(self) -> bool:
        """Read the wake token that has come. Returns False, because it is not a message."""
        try:
            token = self.wake.read()
        except UNREACHABLE as error:
            self._broken(error)
            return False
        if token is None:
            return False
        queue, at_ms = token
        if queue in self.claims.sources:
            in_ms = at_ms - self.claims.clock.now_ms() if at_ms else 0
            self.claims.sources[queue].token(in_ms, monotonic())
        else:
            self._announce(queue)
        return False

    def take_answers(self) -> bool:
        """Read the answers that have come. Returns False, because none is a message."""
        self.session.store.run.hear()
        return False

    # Handing out.

    def hand_out(self) -> bool:
        """Give one claimed message to its consumer; returns whether there was one."""
        buffer = self.claims.buffer
        if not buffer or monotonic() < self.retry.hold_until:
            return False
        while buffer:
            try:
                entry = buffer[0]
            except IndexError:  # the keeper's thread has taken it meanwhile
                break
            queue, tag, _ = entry
            source = self.claims.sources.get(queue)
            if source is None:  # cancelled by a signal handler in the middle of a claim
                if not buffer.take_out(entry):
                    continue
                self._qos.give_back(queue, [tag])
                self._announce(queue)
                continue
            no_ack = source.no_ack
            try:
                seen_at = max(source.claimed_at, source.checked_at)
                is_old = not no_ack and monotonic() - seen_at >= PAUSE_SECONDS
                if is_old and self._was_paused(source):
                    self.hold(queue)
                    continue
                payload = self._opened(entry, no_ack)
            except UNREACHABLE as error:
                self.retry.hold_until = self._broken(error)
                return False
            except BaseException:
                buffer.take_out(entry)
                raise
            if not buffer.take_out(entry):
                self._qos.held.pop(tag, None)  # it was given back meanwhile
            elif payload is not None and self._give(payload, entry, no_ack):
                return True
        return False

    def _was_paused(self, source: Source) -> bool:
        source.checked_at = monotonic()
        return self.session.store.pauses.of(source.queue) is not None

    def _opened(self, entry: Claimed, no_ack: bool) -> dict[str, Any] | None:
        session, lease = self.session, self.session.lease
        held = [entry.queue]
        if (shared := self._qos.slots.shared).pools:
            held += shared.pools_of(entry.tag)
        for queue in held:
            ended = not no_ack and lease.may_have_ended(queue)
            if ended and not lease.renew(queue, session.store):
                raise LeaseLost
        try:
            payload = self.opener.open(entry, no_ack)
        except UNREACHABLE:  # it may have gone elsewhere, or may yet: nobody decides once more
            if not no_ack and self.claims.buffer.take_out(entry):
                self._qos.give_back(entry.queue, [entry.tag])
            raise
        if payload is not None and session.quick_runs < QUICK_RUNS:
            session.mind_blocking()
        return payload

    def _give(self, payload: dict[str, Any], entry: Claimed, no_ack: bool) -> bool:
        session, (queue, tag, _) = self.session, entry
        began, ends = monotonic(), self._qos.slots.ends
        try:
            self._qos.reserved.hand(tag, no_ack)
            session.hand_over(payload, queue)
        except Exception as error:
            sources = self.claims.sources
            if self._qos.took(tag) or (no_ack and self._qos.can_read(payload)):
                if queue in sources:  # else a signal handler raised: the task may have started
                    self._qos.failed(tag)
                raise
            if queue not in sources:  # the error of a signal handler that has cancelled it
                self._qos.give_back(queue, [] if no_ack else [tag])
                raise
            self.opener.refuse(entry, error, no_ack)
            return False
        finally:
            self._qos.reserved.in_hand = None
        session.runs_here = session.runs_here or self._qos.slots.ends != ends
        is_quick = monotonic() - began < BLOCKING_SECONDS
        session.quick_runs = session.quick_runs + 1 if is_quick else -QUICK_AGAIN
        return True

    def step_aside(self) -> None:
        """Let other consumers claim while this thread is busy."""
        if self.wake.waiting:
            self._stop_waiting()
            self.session.store.claimable.announce_all(tuple(self.claims.sources))

    def get(self, queue: str, no_ack: bool, expires_ms: int) -> tuple[dict[str, Any], bytes] | None:
        """Claim one message without waiting; returns it with its record, or None."""
        if expires_ms == AUTO_DELETE:
            self.session.lease.auto_delete.add(queue)
        try:
            return self._get(queue, no_ack, expires_ms)
        except LeaseLost as error:
            self._broken(error)
            raise

    def _get(
        self, queue: str, no_ack: bool, expires_ms: int
    ) -> tuple[dict[str, Any], bytes] | None:
        self.session.progress.stamp()
        self.session.runs_here = True  # nobody knows when the program calls again
        if self.session.lease.lost:
            raise LeaseLost
        self._qos.outbox.flush(self.session.store, self.session.lease)  # what failed before
        self._recover(monotonic())
        while (kept := self.claims.claim_one(queue, no_ack, expires_ms)) is not None:
            for claimed in kept:
                try:
                    payload = self.opener.open(claimed, no_ack)
                except UNREACHABLE:
                    self._qos.give_back(queue, [] if no_ack else [claimed.tag])
                    raise
                if payload is not None:
                    return payload, claimed.record
                # The next message may need the slots that this one had.
                self._qos.outbox.flush(self.session.store, self.session.lease)
        return None
