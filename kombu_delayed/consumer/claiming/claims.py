"""Claims messages from the queues of one server, and recovers those of lost answers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from time import monotonic

from kombu_delayed.connection.cluster.connection import SlotMoves
from kombu_delayed.connection.native import get_logger
from kombu_delayed.connection.wakeup import WakeConnection
from kombu_delayed.errors import UNREACHABLE, LeaseLost
from kombu_delayed.store.claimable import ANSWER_BYTES, Delivered
from kombu_delayed.store.global_limits import Lack
from kombu_delayed.store.store import delivered

from ..lease.standstill import Unbegun
from ..policy.admission import Claimed, Gatekeeper
from ..session import Session
from ..unacked import Room
from .request import Pending, Request, following, may_go_on
from .slow_poll import look
from .sources import FEW_QUEUES, Agenda, Buffer, ServerClock, Shares, Source, share_out, shares

logger = get_logger(__name__)


class Claims:
    """Claims messages from the queues of one server in batches, into a buffer."""

    def __init__(self, session: Session, wake: WakeConnection) -> None:
        self.sources: dict[str, Source] = {}
        self.agenda = Agenda()
        self.buffer = Buffer()
        self.clock = ServerClock()
        #: Queue with a lost answer -> the last tag before those of that answer.
        self.unsure: dict[str, int] = {}
        #: At most one, of an unsure queue. The thread that takes it out deals with it.
        self.pending: deque[Pending] = deque()
        #: The last tag of the claims that the keeper's thread took, and may not have returned yet.
        self._given_up_to = 0
        self.gates = Gatekeeper(session, session.store, session.qos.slots)
        self._session = session
        self._store = session.store
        self._qos = session.qos
        self._wake = wake
        self.room = Room(session.qos, session, self.buffer, self.pending)

    @property
    def listened(self) -> Collection[str]:
        """The queues whose tokens this consumer may follow."""
        return [queue for queue in self.sources if queue not in self.gates.refused]

    def take_over(self, source: Source) -> None:
        """Look after a queue from now on."""
        self.let_go(source.queue)
        self.sources[source.queue] = source
        source.file_in(self.agenda)
        if not source.expires_ms:  # a temporary queue only follows its own program
            self.gates.begin(source.queue)

    def let_go(self, queue: str) -> Source | None:
        """Stop looking after a queue; returns its source, or None."""
        source = self.sources.pop(queue, None)
        if source is not None:
            self.agenda.forget(source)
            self._qos.slots.shared.forget_queue(queue)
        return source

    def give_back_unbegun(self, queue: str) -> None:
        """Return messages that were not handed out or not started, with the next flush."""
        source = self.sources.get(queue)
        if source is not None and not source.no_ack:
            self._qos.give_back(queue, [tag for _, tag, _ in self.buffer.take_out_of(queue)])
            self._qos.give_back_reserved(queue)

    def drop_all(self) -> None:
        """Stop looking after all queues."""
        self.pending.clear()
        self.sources = {}
        self.agenda = Agenda()

    def announce(self, queue: str) -> None:
        """Let others claim from a queue whose token it does not follow. Raises UNREACHABLE."""
        if queue in self.unsure:  # only this one: the pending claim may answer for others
            self.pending.clear()
            consumer, seen_tag = self._session.lease.consumer, self.unsure[queue]
            self._recovered(queue, self._store.leases.recover(queue, consumer, seen_tag))
        self._qos.outbox.flush(self._store, self._session.lease)
        self._store.claimable.announce_soon(queue)

    def take_back(self) -> list[Unbegun]:
        """Give up the claimed messages that were not handed out yet. Safe from any thread."""
        entries, take_over = self.buffer.take_all(), self._qos.slots.take_over
        no_ack = {each.queue for each in list(self.sources.values()) if each.no_ack}
        self.buffer.extend(each for each in reversed(entries) if each.queue in no_ack)
        found = [
            Unbegun(each.queue, each.tag, take_over(each.tag))
            for each in entries
            if each.queue not in no_ack
        ]
        for pending in tuple(self.pending):
            self._given_up_to = pending.request.last_tag  # first: the loop may run at any time
            with suppress(IndexError):
                found += self.pending.pop().request.unbegun
        return found

    # How many, and of which queues.

    def comes_soon(self, now: float) -> bool:
        """Whether a small claim waits for more room, with nothing to hand out before it."""
        if not self.agenda.ready or self.buffer or not (room := self.room.count()):
            return False
        return not self.room.worth_claiming(room, now)

    def next_at(self, latest: float) -> float:
        """When to look after the queues again, `latest` at most; by the monotonic clock."""
        for pending in tuple(self.pending):
            return -math.inf if pending.has_ended else pending.wait_at
        agenda, room = self.agenda, self.room.count()
        times = [latest, agenda.due.first_at, agenda.kept.first_at]
        if room:
            times.append(agenda.polls.first_at)
        if room and agenda.ready:
            times.append(self.room.last_at)
        if room and not self.room.worth_claiming(room, monotonic()):
            return max(min(times), self.room.small_at())
        return min(times)

    def claim_wanted(self, now: float) -> None:
        """Claim from the queues that have something to do, and keep the promises of the others."""
        session, cycle, room = self._session, self._session.cycle, self.room.count()
        poll = partial(look, self._store)
        kept = self.agenda.come(now, room > 0, poll, session.options.poll_seconds)
        if self.gates.new:
            self.gates.declare()
        if self.agenda.ready:
            room = self.room.worth_claiming(room, now)
        turns = len(self.sources) + session.turns_elsewhere
        if room and self.agenda.ready and (wanted := self.agenda.wanted(cycle, turns)):
            if sum(map(len, wanted)) > FEW_QUEUES:
                self._claim_together(wanted, room, now)
            elif self.room.is_used and not kept and may_go_on(session, wanted):
                self._begin(shares(wanted, room, cycle), None, now)
            else:
                share_out(shares(wanted, room, cycle), partial(self._claim, now=now))
            # The first queue may have got one message more than the others: it is last next time.
            cycle.rotate(wanted[0][0].whole)
        for source in kept:
            if source.must_keep(now):
                self._claim(source, 0, now)
        if self.agenda.owing and not self.pending and not self.room.count():
            self._pass_on()

    def _begin(self, shares: Shares, claimed: int | None, now: float) -> None:
        """Send the next claim, after one that has brought `claimed` messages."""
        if (found := following(shares, claimed, self.sources)) is not None:
            source, want = found
            pending = Pending(source, shares, self._request(source.queue, want, False, True), now)
            pending.send(self._store)
            self.pending.append(pending)

    def finish(self, now: float) -> bool:
        """Take in what a pending claim has brought; returns whether no claim is pending now."""
        try:
            pending = self.pending[0]
            if not pending.has_ended:
                if now < pending.wait_at:
                    return False
                self._store.run.settle()
            self.pending.pop()
        except IndexError:  # the keeper's thread has taken it
            return True
        if pending.is_answered:
            answer = self._heard(pending.request, pending.delivered)
            count = self._take_in(pending.source, pending.request, answer, pending.sent_at)
            self._begin(pending.shares, count, now)
        return not self.pending

    def _pass_on(self) -> None:
        """Let others follow the tokens for which this consumer has no room."""
        owing = [*self.agenda.owing.values()]
        with suppress(SlotMoves):  # then another consumer finds out
            self._store.claimable.announce_all([source.queue for source in owing])
            for source in owing:
                source.passed_on()

    def _claim_together(self, wanted: list[list[Source]], room: int, now: float) -> None:
        """Claim from many queues in few round trips; from those that owe it, also without room."""
        wants: dict[str, int] = {}

        def note(source: Source, want: int) -> int:
            wants[source.queue] = want = 1 if source.no_ack else want
            return want

        share_out(shares(wanted, room, self._session.cycle), note)
        asked = [
            (source, self._request(source.queue, want, source.no_ack, True))
            for source in chain.from_iterable(wanted)
            if (want := wants.get(source.queue, 0)) or source.owes or source.must_keep(now)
        ]
        most_bytes = ANSWER_BYTES // max(len(wants), 1)
        answers = self._store.together(
            [self._store.deliver_call(most_bytes=most_bytes, **each.given) for _, each in asked]
        )
        errors = []
        for (source, request), answer in zip(asked, answers, strict=True):
            if isinstance(answer, SlotMoves):
                self._ask_later(source, now)
            elif isinstance(answer, BaseException):
                errors.append(answer)
            else:
                found = delivered(answer, request.given["gate"])
                self._take_in(source, request, self._heard(request, found), now)
        for error in errors:
            raise error

    def _claim(self, source: Source, want: int, now: float) -> int:
        want = 1 if source.no_ack else want
        request = self._request(source.queue, want, source.no_ack, True)
        try:
            answer = self._heard(request, self._store.deliver(**request.given))
        except SlotMoves:
            self._ask_later(source, now)
            return 0
        return self._take_in(source, request, answer, now)

    def _ask_later(self, source: Source, now: float) -> None:
        """Claim again later, because the queue is moving to another node."""
        self._claimed(source.queue)  # nothing was done
        source.moves(now)

    def claim_one(self, queue: str, no_ack: bool, expires_ms: int) -> list[Claimed] | None:
        """Claim one message without waiting; returns what may be handed out, None without any."""
        if queue in self.unsure:
            raise SlotMoves(f"queue {queue!r} is on its way to another node of the Cluster")
        more = True
        # The answer may bring other policies, or say that messages wait for a global limit.
        while more or self._shares(queue):
            request = self._request(queue, 1, no_ack, False)
            request.given["expires_ms"] = expires_ms
            answer = self._heard(request, self._store.deliver(**request.given))
            kept = self._let_in(queue, self._numbered(request, answer.records), no_ack)
            self._claimed(queue, answer.lacking)
            if answer.records:
                return kept
            more = answer.more
        return None

    def _shares(self, queue: str) -> bool:
        """Take a slot of the global limit that a message waits for; returns whether it got one."""
        self._qos.slots.shared.step(self._session, 1, lambda name: name == queue, queue)
        return self._qos.slots.shared.has_for(queue)

    def _claimed(self, queue: str, lacking: Sequence[Lack] | None = None) -> None:
        self.unsure.pop(queue, None)
        self._qos.slots.shared.claimed(queue, lacking)

    def _request(self, queue: str, want: int, no_ack: bool, waits: bool) -> Request:
        """A claim that is about to be sent. Its tags are reserved, whenever it is carried out."""
        session = self._session
        lease, source = session.lease, self.sources.get(queue)
        seen_tag = self.unsure[queue] = session.tag
        session.tag = seen_tag + want
        asked = lease.ask(queue)
        gate = self.gates.gate(queue) if self.gates.in_use else None
        given = {
            "queue": queue,
            "consumer": lease.consumer,
            "want": want,
            "tag": seen_tag + 1,
            "gate": gate,
            "lease_ms": 0 if no_ack else lease.ms,
            "leased": lease.holds(queue) and not no_ack,
            "waits": waits,
            "listens": waits and self._wake.listens(queue),
            "promotions": session.options.promote_batch,
            "expires_ms": source.expires_ms if source else 0,
            "declared": self.gates.versions.get(queue, ""),
            "taken": self._qos.slots.shared.take(queue, gate, want) if gate else "",
        }
        return Request(queue, want, seen_tag, no_ack, monotonic(), asked, given)

    def _heard(self, request: Request, answer: Delivered | None) -> Delivered:
        lease = self._session.lease
        if answer is None:
            anew = partial(self._store.deliver, **{**request.given, "leased": False})
            answer = lease.outlast_data(request.queue, self._store, anew)
        if answer is None:
            lease.lost = True
            raise LeaseLost
        if self.gates.in_use or answer.gated or answer.refused:
            follows = self.gates.answered(request.queue, answer.gated, answer.refused)
            if follows:  # it has brought nothing yet
                answer = answer._replace(refused=False, more=True)
        if not request.no_ack:
            lease.grant(request.queue, request.asked, bool(answer.records))
        self.clock.compare(answer.now_ms, request.made_at)
        if answer.resumed_ms:
            self._session.resumed_ms[request.queue] = answer.resumed_ms
        elif request.queue in self._session.resumed_ms:
            del self._session.resumed_ms[request.queue]
        return answer

    def _take_in(self, source: Source, request: Request, answer: Delivered, now: float) -> int:
        queue, count = source.queue, len(answer.records)
        if self.sources.get(queue) is not source and not source.no_ack:
            # A signal handler has cancelled the queue, maybe before the server claimed these.
            self._give_back(queue, range(request.seen_tag + 1, request.seen_tag + 1 + count))
            self._claimed(queue)
            self.announce(queue)
            return 0
        if answer.refused and source.owes:  # the token is for consumers that may claim
            self._store.claimable.announce_soon(queue)
        poll_seconds = self._session.options.poll_seconds
        source.answered(answer, monotonic(), self.clock, poll_seconds)
        if answer.paused:
            self.give_back_unbegun(queue)
            self._qos.outbox.flush(self._store, self._session.lease)
        self.room.last_at = now
        kept = claimed = self._numbered(request, answer.records)
        try:
            if self.gates.in_use:
                kept = self._let_in(queue, claimed, source.no_ack)
        except SlotMoves:  # stays unsure: they are recovered when the slot has moved
            source.moves(now)
            return count
        self.gates.was_short = len(claimed) < request.want
        self.buffer.extend(kept)
        if len(kept) < len(claimed):
            source.ready = True
        self.unsure.pop(queue, None)
        if self._qos.slots.shared.pools:
            self._qos.slots.shared.claimed(queue, answer.lacking)
        if answer.records:
            source.claimed_at = now
            self._session.cycle.rotate(source.whole)
        return count

    def _numbered(self, request: Request, records: Sequence[bytes]) -> list[Claimed]:
        first, session = request.seen_tag + 1, self._session
        if session.tag == request.seen_tag + request.want:  # no other claim has followed
            session.tag = request.seen_tag + len(records)
        return [Claimed(request.queue, tag, record) for tag, record in enumerate(records, first)]

    def _let_in(self, queue: str, claimed: Sequence[Claimed], no_ack: bool) -> list[Claimed]:
        if not self.gates.in_use:
            return [*claimed]
        try:
            return self.gates.let_in(claimed, self._session.lease, no_ack, self.clock.now_ms())
        except UNREACHABLE:
            if no_ack:  # nobody else has them
                return [*claimed]
            raise

    # Messages in answers that were lost with their connection.

    def recover_all(self) -> None:
        """Recover lost messages; those of a moving queue later, and claim none from it before."""
        if not self.unsure:
            return
        self.pending.clear()  # what its answer has is found anew
        unsure, consumer = dict(self.unsure), self._session.lease.consumer
        for queue, found in self._store.leases.recover_all(unsure, consumer).items():
            with suppress(SlotMoves):
                self._recovered(queue, found)
        for queue in self.unsure:
            if source := self.sources.get(queue):
                source.moves(monotonic())

    def _recovered(self, queue: str, found: list[tuple[int, bytes]]) -> None:
        lease = self._session.lease
        if found and not lease.holds(queue):
            lease.suspect(queue)
        back = found
        if (source := self.sources.get(queue)) is not None:
            source.checked_at = monotonic()  # the next claim says whether it is paused
            # A signal handler may have raised just after they were taken in.
            known = {entry.tag for entry in self.buffer}
            new = [each for each in found if not (each[0] in known or self._qos.queue_of(each[0]))]
            # A consumer without acks has joined since: what the server holds waits for one.
            last = math.inf if source.no_ack else self._given_up_to
            back = [each for each in new if each[0] <= last]
            claimed = [Claimed(queue, *each) for each in new if each[0] > last]
            self.buffer.extend(self._let_in(queue, claimed, False))
        if back:
            self._give_back(queue, [tag for tag, _ in back])
            self._qos.outbox.flush(self._store, lease)
        self._claimed(queue)

    def _give_back(self, queue: str, tags: Sequence[int]) -> None:
        """Give back messages, and their slots, of a queue that it does not consume any more."""
        if self.gates.gate(queue) is not None:
            self._qos.slots.free_unheard(queue, tags)
        self._qos.give_back(queue, tags)
