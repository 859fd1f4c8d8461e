"""Waits for messages and delivers them: the state machine of one channel that consumes.

A wake token says that something can be claimed, now or at a time. A consumer blocks for tokens on
one connection and claims on another. Whoever takes a token follows it or passes it on.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from operator import attrgetter
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from kombu.utils.scheduling import priority_cycle
from kombu.utils.uuid import uuid

from ..connection.native import get_logger
from ..connection.options import Options
from ..errors import UNREACHABLE, FormatError, LeaseLost, MessageError, NotReplicated
from ..message.envelope import Envelope, due, hide_eta, open_envelope
from ..message.ticket import Gate
from ..store import instrumentation
from ..store.scripts import Call
from ..store.store import Delivered, Entry, Store, delivered
from .lease.lease import Lease
from .outliving_tasks import Remaining, remain
from .policy.admission import Claimed, Gatekeeper
from .policy.apply import rule
from .policy.decisions import Arrival, Rules
from .slow_poll import look
from .sources import AUTO_DELETE, POLL_JITTER, Agenda, Source
from .standstill import Progress, Unbegun

if TYPE_CHECKING:
    from ..connection.wakeup import WakeConnection
    from .unacked import QoS

logger = get_logger(__name__)

#: Then others take over what this consumer holds, when its lease has ended.
_CANNOT_LEAVE: tuple[type[BaseException], ...] = (*UNREACHABLE, FormatError)

#: Messages claimed at once by a consumer without a prefetch limit.
UNLIMITED_CLAIM = 50

LARGEST_CLAIM = 250

#: A claim for less than half of the prefetch limit waits so long for more room.
SMALL_CLAIM_SECONDS = 0.003

#: Claims from more queues than these travel together. One by one the room that one queue leaves is
#: the next one's at once.
FEW_QUEUES = 4

#: More between the server's clock and ours means that one of them was set.
CLOCK_JUMP_MS = 20

#: How far the two clocks run apart in a second.
CLOCK_DRIFT_MS = 0.2

#: Who takes a message for longer runs its tasks in the thread that waits for messages …
BLOCKING_SECONDS = 0.1

#: … and who has not done so this many times in a row does not, or as many times more after one.
QUICK_RUNS, QUICK_AGAIN = 3, 50

FIRST_RETRY_SECONDS = 0.05
LONGEST_RETRY_SECONDS = 1.0

#: With an ack to send: its task runs again if this process dies before.
ACK_RETRY_SECONDS = 0.2


_claimed_at = attrgetter("claimed_at")


class Request(NamedTuple):
    """A claim of one queue, on its way: for so many messages, under tags behind `seen_tag`."""

    queue: str
    consumer: str
    want: int
    seen_tag: int
    no_ack: bool
    asked: tuple[float, float]
    gate: Gate | None
    options: dict[str, Any]

    def send(self, store: Store) -> Delivered | None:
        """Send it alone and wait for its answer."""
        first_tag = self.seen_tag + 1
        return store.deliver(
            self.queue, self.consumer, self.want, first_tag, gate=self.gate, **self.options
        )

    def call(self, store: Store) -> Call:
        """What to send with others."""
        first_tag = self.seen_tag + 1
        return store.deliver_call(
            self.queue, self.consumer, self.want, first_tag, gate=self.gate, **self.options
        )


class Consumer:
    """Claims messages of its sources in batches and hands them out one by one."""

    #: When it is closed: tasks of it that still run.
    remaining: Remaining | None = None

    def __init__(
        self,
        store: Store,
        options: Options,
        qos: QoS,
        wake: WakeConnection,
        cycle: Any,
        hand_over: Callable[[dict[str, Any], str], None],
        lease: Lease | None = None,
        rules: Rules | None = None,
    ) -> None:
        self.store = store
        self.options = options
        self.wake = wake
        self.lease = lease or Lease(store, options.lease_seconds)
        self.sources: dict[str, Source] = {}
        self._agenda = Agenda()
        self.patience_seconds = options.reconnect_seconds
        self._qos = qos
        self._cycle = cycle
        self._hand_over = hand_over
        self._rules = rules
        self._gates = Gatekeeper(store, rules, qos.slots)
        self._buffer: deque[Claimed] = deque()
        self._tag = 0
        self._last_claim_at = -math.inf
        self._server_ahead_ms = -math.inf
        self._compared_at = 0.0
        #: Queues of which an answer was lost, each with the last tag before those of that answer.
        self._unsure: dict[str, int] = {}
        self._quick_runs = 0
        #: Whether tasks end before `_hand_over` returns, or may: the next one may take for long.
        self._runs_here = False
        self._broken_since: float | None = None
        self._retry_at = -math.inf
        self._ack_retry_at = -math.inf
        self._hold_until = -math.inf
        self._retry_seconds = FIRST_RETRY_SECONDS
        self.progress = self._new_progress()

    def _new_progress(self) -> Progress:
        progress = Progress(
            self.lease.seconds, self.lease.clock, self.take_back, lambda: tuple(self.sources)
        )
        self.lease.progress = progress
        return progress

    def add(self, queue: str, no_ack: bool, expires_ms: int) -> None:
        """Consume a queue from now on."""
        source = Source(queue, no_ack, expires_ms)
        if expires_ms == AUTO_DELETE:
            self.lease.auto_delete.add(queue)
        self.take_over(source)
        source.claim_anew()
        if self.wake.waiting:
            self._stop_waiting()

    def take_over(self, source: Source) -> None:
        """Look after a queue from now on."""
        self.let_go(source.queue)
        self.sources[source.queue] = source
        source.file_in(self._agenda)

    def let_go(self, queue: str) -> Source | None:
        """Look after a queue no longer."""
        source = self.sources.pop(queue, None)
        if source is not None:
            self._agenda.forget(source)
        return source

    def remove(self, queue: str) -> None:
        """Consume a queue no more: what was claimed and not handed out, or not begun, goes back."""
        source = self.sources.get(queue)
        if source is None:
            return
        if not source.no_ack:
            self._qos.give_back(queue, [tag for _, tag, _ in self._taken_out_of(queue)])
            self._qos.give_back_reserved(queue)
        self._taken_out_of(queue)
        self.let_go(queue)  # last: a signal handler may have ended this half way
        self._announce(queue)

    def _taken_out_of(self, queue: str) -> list[Claimed]:
        """What was claimed of a queue, which is not in the buffer any more."""
        taken: list[Claimed] = []
        with suppress(IndexError):  # another thread takes from its end
            for _ in range(len(self._buffer)):
                entry = self._buffer.popleft()
                (taken if entry.queue == queue else self._buffer).append(entry)
        return taken

    def take_back(self) -> list[Unbegun]:
        """Take what was claimed and not begun away from this consumer. From any thread."""
        found, stay = self._qos.take_reserved(), []
        with suppress(IndexError):  # the loop's thread takes from the other end
            while True:
                entry = self._buffer.pop()
                source = self.sources.get(entry.queue)
                if source is not None and source.no_ack:
                    stay.append(entry)
                else:
                    has_slots = self._qos.slots.take_over(entry.tag)
                    found.append(Unbegun(entry.queue, entry.tag, has_slots))
        self._buffer.extend(reversed(stay))
        return found

    def _announce(self, queue: str) -> None:
        """This consumer took a token that it does not follow."""
        try:
            if queue in self._unsure:  # of the others the claim under way may have answers
                seen_tag = self._unsure[queue]
                found = self.store.leases.recover(queue, self.lease.consumer, seen_tag)
                self._recovered(queue, found)
            self._qos.outbox.flush(self.store, self.lease)
            self.store.claimable.announce_soon(queue)
        except UNREACHABLE as error:
            logger.info("Other consumers of queue %r look by themselves: %s", queue, error)

    @property
    def wakes(self) -> list[WakeConnection]:
        """What it waits on."""
        return [self.wake]

    def _stop_waiting(self) -> None:
        """A token may be on its way and get lost: claim, or let others, whatever it was for."""
        self.wake.reset()
        for source in tuple(self.sources.values()):
            source.claim_anew()

    def close(self) -> None:
        """Stop: whatever is still unacked is for other consumers now. Twice is safe."""
        queues = {*self.sources, *self.lease.queues}
        self.drop_all()
        self.lease.end()
        self.wake.close()
        self._buffer.clear()
        for queue in filter(self._qos.slots.running, queues):
            self._qos.give_back_reserved(queue)  # what has begun goes on
        try:
            self._leave(queues)
        except _CANNOT_LEAVE:
            self._leave_late(queues)
        self.remaining = remain(self.lease, queues, self._qos.slots) or self.remaining

    def drop_all(self) -> None:
        """Look after no queue any longer."""
        self.sources = {}
        self._agenda = Agenda()

    def _leave(self, queues: set[str]) -> None:
        self._qos.release_failed()
        self._qos.outbox.settle(self.store, self.lease)  # leaving gives back what is not acked yet
        errors = self.store.leases.leave_all(
            [*queues], self.lease.consumer, self._qos.slots.running
        )
        for error in errors.values():
            raise error

    def _leave_late(self, queues: set[str]) -> None:
        """The connection may have been closed long ago: a new one tells whether the broker is."""
        try:
            self._leave(queues)
        except _CANNOT_LEAVE as error:
            logger.warning(
                "Consumer %s stops without the broker (%s): its unacknowledged messages return to "
                "their queues within %g seconds",
                self.lease.consumer,
                error,
                self.lease.seconds,
            )

    # The step: what is due now, and when to come back.

    def step(self) -> float:
        """Do what is due; returns when to come back, by the monotonic clock."""
        self.progress.stamp()
        now = monotonic()
        if now < (retry_at := self._try_again_at):
            return retry_at
        try:
            self._step(now)
        except UNREACHABLE as error:
            return self._broken(error)
        self._mended()
        return self._next_step_at()

    def _step(self, now: float) -> None:
        if self.lease.lost:
            raise LeaseLost
        if self.wake.check(now):
            self._stop_waiting()
        self._agenda.spread = random.uniform(POLL_JITTER, 1.0)
        self._look(now)
        if self._qos.outbox.has_rejects or (self._qos.outbox.freed and self._gates.was_short):
            self._qos.outbox.flush(self.store, self.lease)
        self._recover_all()
        self._claim_wanted(now)
        # Acks are not waited for: behind the claim they do not hold up its answer.
        self._qos.outbox.flush(self.store, self.lease, slots_wait=not self._runs_here)
        if not self._buffer and self._room() and len(self._agenda.ready) < len(self.sources):
            self.wake.start(self.sources)

    def _look(self, now: float) -> None:
        """Acks that the server has refused, or has not heard of, leave with the next flush."""
        if now >= self._look_at:
            self.store.run.look()

    @property
    def _look_at(self) -> float:
        return self.store.run.look_at

    def _next_step_at(self) -> float:
        agenda, room = self._agenda, self._room()
        times = [self.wake.overdue_at, self._look_at, self._qos.outbox.free_at]
        times += [agenda.due.first_at, agenda.kept.first_at]
        if room:
            times.append(agenda.polls.first_at)
        if room and agenda.ready:
            times.append(self._last_claim_at)
        if room and not self._worth_claiming(room, monotonic()):
            return max(min(times), self._last_claim_at + SMALL_CLAIM_SECONDS)
        return min(times)

    def _broken(self, error: BaseException) -> float:
        self._stop_waiting()
        if isinstance(error, LeaseLost):
            self._start_anew()
            raise error
        now = monotonic()
        if self._broken_since is None:
            self._broken_since = now
            logger.warning("Lost the broker, trying again: %s", error)
        if now - self._broken_since >= self.patience_seconds:
            self._broken_since = None
            raise error
        self._retry_at = now + self._retry_seconds
        self._ack_retry_at = now + min(self._retry_seconds, ACK_RETRY_SECONDS)
        self._retry_seconds = min(self._retry_seconds * 2, LONGEST_RETRY_SECONDS)
        return self._retry_at

    @property
    def _try_again_at(self) -> float:
        return self._ack_retry_at if self._qos.outbox.has_any else self._retry_at

    def _start_anew(self) -> None:
        """Others have what this consumer held: it goes on as a new one, and lets Kombu know."""
        logger.warning(
            "The lease of consumer %s has ended and others get what it held: it starts anew",
            self.lease.consumer,
        )
        if (told := instrumentation.current) is not None:
            told.lease_lost()
        self.lease.end()
        self.progress.forget()
        self.lease = self.lease.successor()
        self._buffer.clear()
        self._unsure.clear()
        self._qos.forget()

    def _mended(self) -> None:
        if self._broken_since is None:
            return
        logger.warning("The broker is back after %.1f s", monotonic() - self._broken_since)
        self._broken_since = None
        self._retry_seconds = FIRST_RETRY_SECONDS

    def hurry(self) -> None:
        """Try again at once: the broker may be back. From any thread."""
        self._retry_at = self._ack_retry_at = self._hold_until = -math.inf

    # Claiming.

    @property
    def idle(self) -> bool:
        """Whether it neither claims nor waits, as it had no room when it could have."""
        if not self.sources:
            return False
        return not self.wake.waiting or bool(self._agenda.ready)

    def _room(self) -> int:
        """How many messages may be claimed."""
        if "can_consume" in self._qos.__dict__:  # by Celery's worker_disable_prefetch: one by one
            return int(not self._buffer and self._qos.can_consume())
        if not self._qos.prefetch_count:
            return 0 if self._buffer else UNLIMITED_CLAIM
        room = self._qos.prefetch_count - self._qos.outstanding - len(self._buffer)
        return min(max(room, 0), LARGEST_CLAIM)

    def _worth_claiming(self, room: int, now: float) -> int:
        most = min(self._qos.prefetch_count, LARGEST_CLAIM)
        is_small = room < most // 2 and "can_consume" not in self._qos.__dict__
        return 0 if is_small and now - self._last_claim_at < SMALL_CLAIM_SECONDS else room

    def _claim_wanted(self, now: float) -> None:
        room = self._room()
        kept = self._look_around(room, now)
        if (room := self._worth_claiming(room, now)) and (wanted := self._wanted()):
            if sum(map(len, wanted)) > FEW_QUEUES:
                self._claim_together(wanted, room, now)
            else:
                self._share_out(wanted, room, partial(self._claim, now=now))
            # The first may have had one more than the others: it is the last one next time.
            self._cycle.rotate(wanted[0][0].whole)
        for source in kept:
            if source.must_keep(now):
                self._claim(source, 0, now)
        if self._agenda.owing and not self._room():
            self._pass_on()

    def _look_around(self, room: int, now: float) -> list[Source]:
        """Find out what is ready; returns those that expire without a call."""
        for source in self._agenda.due.come(now):
            source.ready = source.owes = True
        kept = self._agenda.kept.come(now)
        polled = self._agenda.polls.come_early(now) if room else []
        found = look(self.store, polled, now) if polled else set()
        for source in polled:
            if source.queue not in found:
                source.looked(now, self.options.poll_seconds)
        for source in [*kept, *(each for each in polled if each.queue in found)]:
            source.found = source.found or not source.ready
            source.ready = True
        return kept

    def _pass_on(self) -> None:
        """Let others follow the tokens for which this consumer has no room."""
        owing = [*self._agenda.owing.values()]
        self.store.claimable.announce_all([source.queue for source in owing])
        for source in owing:
            source.passed_on()

    def _wanted(self) -> list[list[Source]]:
        """The shards to claim from: of each queue in its turn, and each shard in its turn."""
        shards: dict[str, list[Source]] = {}
        for source in sorted(self._agenda.ready.values(), key=_claimed_at):
            shards.setdefault(source.whole, []).append(source)
        return [shards[q] for q in self._cycle.consume(self._turns) if q in shards]

    @property
    def _turns(self) -> int:
        """How many queues take turns, at the most."""
        return len(self.sources)

    def _share_out(
        self, wanted: list[list[Source]], room: int, claim: Callable[[Source, int], int]
    ) -> None:
        """Claim for each its share of the room, and for the next ones what it has left."""
        is_strict = isinstance(self._cycle, priority_cycle)
        for queues, shards in zip(range(len(wanted), 0, -1), wanted, strict=True):
            part = room if is_strict else -(-room // queues)
            for left, source in zip(range(len(shards), 0, -1), shards, strict=True):
                claimed = claim(source, share) if (share := -(-part // left)) > 0 else 0
                room, part = room - claimed, part - claimed

    def _claim_together(self, wanted: list[list[Source]], room: int, now: float) -> None:
        """Claim of many queues in few round trips; of those that owe it, also without room."""
        wants: dict[str, int] = {}

        def note(source: Source, want: int) -> int:
            wants[source.queue] = want = 1 if source.no_ack else want
            return want

        self._share_out(wanted, room, note)
        asked = [
            (source, self._request(source.queue, want, source.no_ack, True))
            for source in chain.from_iterable(wanted)
            if (want := wants.get(source.queue, 0)) or source.owes or source.must_keep(now)
        ]
        answers = self.store.together([request.call(self.store) for _, request in asked])
        errors = []
        for (source, request), answer in zip(asked, answers, strict=True):
            if not isinstance(answer, BaseException):
                found = delivered(answer, request.gate)
                self._take_in(source, request, self._heard(request, found), now)
            elif not self._moves(source, answer, now):
                errors.append(answer)
        for error in errors:
            raise error

    def _moves(self, source: Source, error: BaseException, now: float) -> bool:
        """Whether a claim was refused as the queue is on its way to another node."""
        return False

    def _claim(self, source: Source, want: int, now: float) -> int:
        want = 1 if source.no_ack else want
        request = self._request(source.queue, want, source.no_ack, True)
        return self._take_in(source, request, self._deliver(request), now)

    def _take_in(self, source: Source, request: Request, answer: Delivered, now: float) -> int:
        queue, count = source.queue, len(answer.records)
        if self.sources.get(queue) is not source and not source.no_ack:
            # A signal handler has cancelled it meanwhile, maybe before the server claimed these.
            self._give_back(queue, range(request.seen_tag + 1, request.seen_tag + 1 + count))
            self._unsure.pop(queue, None)
            self._announce(queue)
            return 0
        source.answered(answer, monotonic(), self._server_ms(), self.options.poll_seconds)
        self._last_claim_at = now
        claimed = self._numbered(request, answer.records)
        kept = self._let_in(queue, claimed, source.no_ack)
        self._gates.was_short = len(claimed) < request.want
        self._buffer.extend(kept)
        if len(kept) < len(claimed):
            source.ready = True
        self._unsure.pop(queue, None)
        if answer.records:
            source.claimed_at = now
            self._cycle.rotate(source.whole)
        return count

    def _numbered(self, request: Request, records: Sequence[bytes]) -> list[Claimed]:
        if self._tag == request.seen_tag + request.want:  # nobody has asked for more since
            self._tag = request.seen_tag + len(records)
        first = request.seen_tag + 1
        return [Claimed(request.queue, tag, record) for tag, record in enumerate(records, first)]

    def _let_in(self, queue: str, claimed: Sequence[Claimed], no_ack: bool) -> list[Claimed]:
        try:
            return self._gates.let_in(claimed, self.lease, no_ack, self._server_ms())
        except UNREACHABLE:
            if no_ack:  # nobody else has them
                return [*claimed]
            raise

    def _request(self, queue: str, want: int, no_ack: bool, waits: bool) -> Request:
        """A claim that is about to be sent. Its tags are its own, whenever it is carried out."""
        seen_tag = self._unsure[queue] = self._tag
        self._tag = seen_tag + want
        source = self.sources.get(queue)
        asked, gate = self.lease.ask(queue), self._gates.gate(queue)
        options = {
            "lease_ms": 0 if no_ack else self.lease.ms,
            "leased": self.lease.holds(queue) and not no_ack,
            "waits": waits,
            "listens": waits and self._listens(queue),
            "promotions": self.options.promote_batch,
            "expires_ms": source.expires_ms if source else 0,
        }
        consumer = self.lease.consumer
        return Request(queue, consumer, want, seen_tag, no_ack, asked, gate, options)

    def _deliver(self, request: Request) -> Delivered:
        return self._heard(request, request.send(self.store))

    def _heard(self, request: Request, answer: Delivered | None) -> Delivered:
        if answer is None:
            anew = request._replace(options={**request.options, "leased": False})
            answer = self.lease.outlast_data(
                request.queue, self.store, lambda: anew.send(self.store)
            )
        if answer is None:
            self.lease.lost = True
            raise LeaseLost
        self._gates.answered(request.queue, answer.gated)
        if not request.no_ack:
            self.lease.grant(request.queue, request.asked, bool(answer.records))
        self._compare_clocks(answer.now_ms)
        return answer

    def _listens(self, queue: str) -> bool:
        """Whether it is sent tokens, rather than to take them."""
        return False

    def _compare_clocks(self, server_ms: int) -> None:
        """The server's time comes late and in whole milliseconds: the most advanced is nearest."""
        now = monotonic()
        ahead_ms = server_ms - now * 1000
        known_ms = self._server_ahead_ms - (now - self._compared_at) * CLOCK_DRIFT_MS
        set_back = known_ms - ahead_ms > CLOCK_JUMP_MS
        self._server_ahead_ms = ahead_ms if set_back else max(known_ms, ahead_ms)
        self._compared_at = now

    def _recover_all(self) -> None:
        """Take what was in answers that were lost with their connection."""
        if self._unsure:
            unsure = dict(self._unsure)
            for queue, found in self.store.leases.recover_all(unsure, self.lease.consumer).items():
                self._recovered(queue, found)

    def _recovered(self, queue: str, found: list[tuple[int, bytes]]) -> None:
        if found and not self.lease.holds(queue):
            self.lease.suspect(queue)
        if queue in self.sources:
            claimed = [Claimed(queue, tag, record) for tag, record in found]
            self._buffer.extend(self._let_in(queue, claimed, False))
        else:
            self._give_back(queue, [tag for tag, _ in found])
            self._qos.outbox.flush(self.store, self.lease)
        self._unsure.pop(queue, None)

    def _give_back(self, queue: str, tags: Sequence[int]) -> None:
        """What was claimed of a queue that it does not consume any more; with its slots."""
        if self._gates.gate(queue) is not None:
            self._qos.slots.free_unheard(queue, tags)
        self._qos.give_back(queue, tags)

    def take_token(self, connection: Any = None) -> None:
        """Read the wake token that has come over one of the connections."""
        if not self.wake.waiting:
            self.wake.reset()  # an idle connection was closed by the server
            return
        try:
            token = self.wake.read()
        except UNREACHABLE as error:
            self._broken(error)
            return
        if token is None:
            return
        queue, at_ms = token
        if queue in self.sources:
            self.sources[queue].token(at_ms - self._server_ms(), monotonic())
        else:
            self._announce(queue)

    def _server_ms(self) -> float:
        return monotonic() * 1000 + self._server_ahead_ms

    # Handing out.

    @property
    def has_messages(self) -> bool:
        """Whether claimed messages can be handed out."""
        return bool(self._buffer) and monotonic() >= self._hold_until

    def hand_out(self) -> bool:
        """Give one claimed message to its consumer; returns whether there was one."""
        self.progress.stamp()
        while (entry := self._first_claimed()) is not None:
            queue, tag, record = entry
            source = self.sources.get(queue)
            if source is None:  # cancelled by a signal handler in the middle of a claim
                if not self._take_out(entry):
                    continue
                self._qos.give_back(queue, [tag])
                self._announce(queue)
                continue
            no_ack = source.no_ack
            try:
                ended = not no_ack and self.lease.may_have_ended(queue)
                if ended and not self.lease.renew(queue, self.store):
                    raise LeaseLost
                payload = self._open(queue, tag, record, no_ack)
                if payload is not None:
                    self._mind_blocking()
            except UNREACHABLE as error:
                self._retry_at = self._hold_until = self._broken(error)
                return False
            except BaseException:
                self._take_out(entry)
                raise
            if not self._take_out(entry):
                self._qos.withdraw(tag)
            elif payload is not None and self._give(payload, queue, tag, record, no_ack):
                return True
        return False

    def _first_claimed(self) -> Claimed | None:
        try:
            return self._buffer[0]
        except IndexError:
            return None

    def _take_out(self, entry: Claimed) -> bool:
        """Whether the first of what was claimed was still there, and not given back meanwhile."""
        try:
            is_there = self._buffer[0] is entry
            if is_there:
                self._buffer.popleft()
        except IndexError:  # the keeper's thread has taken it meanwhile
            return False
        return is_there

    def _give(
        self, payload: dict[str, Any], queue: str, tag: int, record: bytes, no_ack: bool
    ) -> bool:
        began, ends = monotonic(), self._qos.slots.ends
        try:
            with self._qos.reserved.in_hand(tag):
                self._hand_over(payload, queue)
        except Exception as error:
            if self._qos.took(tag) or (no_ack and self._qos.can_read(payload)):
                if queue in self.sources:  # else a signal handler has raised: it may have begun
                    self._qos.failed(tag)
                raise
            if queue not in self.sources:  # the error of a signal handler that has cancelled it
                self._qos.give_back(queue, [] if no_ack else [tag])
                raise
            self.refuse(queue, tag, record, error, no_ack)
            return False
        self._runs_here = self._runs_here or self._qos.slots.ends != ends
        is_quick = monotonic() - began < BLOCKING_SECONDS
        self._quick_runs = self._quick_runs + 1 if is_quick else -QUICK_AGAIN
        return True

    def _mind_blocking(self) -> None:
        """If tasks run in this very thread, others have to keep its promises meanwhile."""
        if self._quick_runs >= QUICK_RUNS:
            return
        self._qos.outbox.settle(self.store, self.lease)  # nobody would hear of an ack's refusal
        if self.wake.waiting:
            self._stop_waiting()
            self.announce_all()

    def announce_all(self) -> None:
        """Let others claim whatever there is in its queues."""
        self.store.claimable.announce_all(tuple(self.sources))

    def get(self, queue: str, no_ack: bool) -> tuple[dict[str, Any], bytes] | None:
        """Claim one message of a queue without waiting, with its record; None: there is none."""
        self.progress.stamp()
        if self.lease.lost:
            raise LeaseLost
        self._recover_all()
        while True:
            request = self._request(queue, 1, no_ack, False)
            if not (records := self._deliver(request).records):
                break
            claimed = self._numbered(request, records)
            kept = self._let_in(queue, claimed, no_ack)
            self._unsure.pop(queue, None)
            for _, tag, record in kept:
                try:
                    payload = self._open(queue, tag, record, no_ack)
                except UNREACHABLE:
                    self._qos.give_back(queue, [] if no_ack else [tag])
                    raise
                if payload is not None:
                    return payload, record
        self._unsure.pop(queue, None)
        return None

    def refuse(self, queue: str, tag: int, record: bytes, error: Exception, no_ack: bool) -> None:
        """Bury a message whose body cannot be read, or which is none for its consumer."""
        is_known = isinstance(error, MessageError)
        reason = str(error) if is_known else f"its body cannot be read: {error}"
        self._bury(queue, tag, record, reason, no_ack)
        self._qos.slots.free(tag)

    def _open(self, queue: str, tag: int, record: bytes, no_ack: bool) -> dict[str, Any] | None:
        """The message for its consumer, or None where it went elsewhere."""
        payload = self._checked(queue, tag, record, no_ack)
        if payload is None:
            self._qos.slots.free(tag)
        return payload

    def _checked(self, queue: str, tag: int, record: bytes, no_ack: bool) -> dict[str, Any] | None:
        try:
            envelope = open_envelope(record[1:], tag)
        except MessageError as error:
            self._bury(queue, tag, record, str(error), no_ack)
            return None
        if envelope.due_ms is None and (at_ms := self._not_yet_due(envelope)):
            if no_ack:
                entry = Entry(envelope.id, record[0] - 48, record[1:].decode(), str(at_ms))
                with suppress(NotReplicated):  # that is for its producer to know
                    self.store.schedule(queue, [entry])
            else:
                self.store.park(queue, self.lease.consumer, [(tag, envelope.id, at_ms)])
            return None
        if self._rules is not None:
            arrival = Arrival(queue, envelope, record, math.ceil(self._server_ms()), self.store)
            if not rule(self._rules, arrival, self.lease.consumer, no_ack):
                return None
        if not no_ack:
            self._qos.received(tag, queue, envelope.id)
        if (told := instrumentation.current) is not None:
            due_ms = envelope.due_ms
            late_seconds = None if due_ms is None else (self._server_ms() - due_ms) / 1000
            told.delivered(queue, late_seconds, envelope.deliveries)
        return envelope.payload

    def _not_yet_due(self, envelope: Envelope) -> int | None:
        """A stock producer makes messages ready before they are due; returns when they are."""
        when = due(envelope.payload)
        if when is None:
            return None
        server_ms = math.ceil(self._server_ms())
        at_ms = server_ms + (when.delay_ms or 0) if when.at_ms is None else when.at_ms
        if at_ms > server_ms:
            return at_ms
        hide_eta(envelope.payload, at_ms)
        return None

    def _bury(self, queue: str, tag: int, record: bytes, reason: str, no_ack: bool) -> None:
        logger.error("A message in queue %r is buried: %s: %.200r", queue, reason, record)
        entry = tag, uuid(), reason, record if no_ack else b""
        self.store.bury(queue, self.lease.consumer, [entry])
