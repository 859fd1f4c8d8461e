"""Enforces turns and limits for the queues of one consumer."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Hashable, Sequence
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from redis import ResponseError

from kombu_delayed.connection.cluster.connection import SlotMoves
from kombu_delayed.connection.native import get_logger
from kombu_delayed.errors import (
    UNREACHABLE,
    CompressionError,
    MessageError,
    OptionError,
    ServerFull,
)
from kombu_delayed.message.envelope import open_envelope
from kombu_delayed.message.ticket import OPEN_GATE, Gate, version_of
from kombu_delayed.store.policies.declared import PolicyRecord
from kombu_delayed.store.store import Store

from .apply import ticketed
from .decisions import Arrival, Rules, rules_to_follow

if TYPE_CHECKING:
    from ..lease.lease import Lease
    from .slots import Slots

logger = get_logger(__name__)


class Claimed(NamedTuple):
    """A message that was delivered to a consumer."""

    queue: str
    tag: int
    record: bytes


#: A process, its broker and one of its queues.
Place = tuple[int, Hashable, str]

#: The places and texts that this process has declared.
_declared_here: set[tuple[Place, str]] = set()

#: Policies are declared to a full server again after this time.
FULL_SECONDS = 10.0


class Ruled(Protocol):
    """The part of a consumer's session that is used here."""

    rules: Rules | None
    lease: Lease
    broker: Hashable


class Gatekeeper:
    """Knows the policies of queues, and sends messages without a ticket back to the gates."""

    def __init__(self, session: Ruled, store: Store, slots: Slots) -> None:
        self._session = session
        self._store = store
        self._slots = slots
        #: Queue -> the version of the declared policies that this consumer follows, and below
        #: their text.
        self.versions: dict[str, str] = {}
        self._texts: dict[str, str] = {}
        #: Queues that it has begun to consume since the last `declare`.
        self.new: list[str] = []
        #: Queues without a gate, with messages that still wait at the gate they had.
        self._left: set[str] = set()
        #: Queues with policies that this consumer cannot apply.
        self.refused: set[str] = set()
        #: Whether any queue may have a gate or such messages; if not, checks are skipped.
        self.in_use = session.rules is not None
        self._full_until = -math.inf
        #: Whether the last claim has brought less than was wanted, perhaps because of limits.
        self.was_short = True

    def gate(self, queue: str) -> Gate | None:
        """The gate of a queue, or None if it has none."""
        rules = self._session.rules
        gate = rules.gate(queue) if rules is not None else None
        return OPEN_GATE if gate is None and queue in self._left else gate

    def begin(self, queue: str) -> None:
        """Have the next `declare` put this program's policies of a queue in force for all."""
        if self._own(queue):
            self.new.append(queue)

    def declare(self) -> None:
        """Declare the policies of new queues. Later declarations of others stay.

        On a server that has lost its policies, those that this consumer followed are declared.
        """
        if monotonic() < self._full_until:
            return
        new, self.new = self.new, []
        try:
            self._declare(new)
        except UNREACHABLE:
            self.new = new
            raise

    def _declare(self, queues: Sequence[str]) -> None:
        records = self._store.policies
        asked = []
        for queue, known in zip(queues, records.read_each(queues), strict=True):
            if isinstance(known, BaseException):
                self._again(queue, known)
                continue
            try:
                text = self._to_declare(queue, known)
            except OptionError as error:
                self._refuse(queue, known, error)
                continue
            if text == known.text:
                self._declared(queue, known)
            else:
                asked.append((queue, known, text))
        by = self._session.lease.consumer
        calls = [records.declare_call(queue, text, by, known) for queue, known, text in asked]
        for (queue, _, text), answer in zip(asked, self._store.together(calls), strict=True):
            if isinstance(answer, BaseException) or not answer:
                self._again(queue, answer)
            else:
                self._declared(queue, PolicyRecord(version_of([text]), text, by))

    def _again(self, queue: str, answer: Any) -> None:
        """Declare again with the next claim: the server was not told, or others were faster."""
        if isinstance(answer, (ResponseError, ServerFull)):
            logger.warning(
                "The policies that this worker declares for queue %r are not stored: %s",
                queue,
                answer,
            )
            self._full_until = monotonic() + FULL_SECONDS
        elif isinstance(answer, BaseException) and not isinstance(answer, SlotMoves):
            raise answer
        self.new.append(queue)

    def _to_declare(self, queue: str, known: PolicyRecord) -> str:
        rules, own = self._session.rules, self._own(queue)
        held = "" if known.is_offered else known.text
        held = held or self._texts.get(queue, "")
        text = held or known.text
        if rules is None or not own or (held and (self._place(queue), own) in _declared_here):
            return text
        return rules.declared(queue, text)

    def _declared(self, queue: str, known: PolicyRecord) -> None:
        _declared_here.add((self._place(queue), self._own(queue)))
        self._follow(queue, known)

    def _own(self, queue: str) -> str:
        rules = self._session.rules
        return rules.declared(queue) if rules is not None else ""

    def _place(self, queue: str) -> Place:
        return os.getpid(), self._session.broker, queue

    def answered(self, queue: str, gated: bool, refused: bool) -> bool:
        """Handle what a claim says of policies and gates that this consumer does not know.

        Messages may wait at a gate because another program has declared it. Returns whether this
        consumer follows other policies from now on, so that it may claim again.
        """
        if refused:
            return self._learn(queue)
        self.refused.discard(queue)
        if gated:
            self._left.add(queue)
            self.in_use = True
        elif queue in self._left:
            self._left.discard(queue)
            with suppress(*UNREACHABLE):  # the doctor does not mind empty lanes
                self._store.clear(queue)
        return False

    def _learn(self, queue: str) -> bool:
        self._left.discard(queue)
        self.in_use = True
        try:
            known = self._store.policies.read(queue)
            if known.text and not known.is_offered:
                self._follow(queue, known)
            else:  # the server has lost them, or never had those of a consumer
                self._declare([queue])
        except SlotMoves:
            return False
        return queue not in self.refused and queue not in self.new

    def _follow(self, queue: str, known: PolicyRecord) -> None:
        session, before = self._session, self.versions.get(queue)
        try:
            if session.rules is None:
                session.rules = rules_to_follow()
            session.rules.follow(queue, known.text)
        except OptionError as error:
            self._refuse(queue, known, error)
            return
        self.refused.discard(queue)
        self.versions[queue] = known.version
        self._texts[queue] = sys.intern(known.text)  # many queues have the same
        if before is not None and before != known.version:
            logger.info("Queue %r has other policies now, declared by %s", queue, known.by)

    def _refuse(self, queue: str, known: PolicyRecord, error: Exception) -> None:
        if queue not in self.refused:
            self.refused.add(queue)
            logger.error(
                "This consumer takes no messages from queue %r, because it cannot apply its "
                "policies. %s declared them; %s. Start this program with the code that declares "
                "them, or without this queue",
                queue,
                known.by or "Another program",
                error,
            )

    def let_in(
        self, claimed: Sequence[Claimed], lease: Lease, no_ack: bool, server_ms: float
    ) -> list[Claimed]:
        """Returns the messages that may be handed out; the others wait for their turn from now on.

        A message that cannot be read may be handed out, and is buried when it is opened.
        """
        rules = self._session.rules
        if not claimed or rules is None:
            return [*claimed]
        queue = claimed[0].queue
        gate = rules.gate(queue)
        if gate is None:
            return [*claimed]
        stay: list[Claimed] = []
        sent: list[tuple[int, str, bytes]] = []
        for each in claimed:
            if gate.has_ticket(each.record):
                stay.append(each)
                if (gate.has_slots or gate.global_limits) and not no_ack:
                    shared = gate.global_slots(each.record)
                    record = each.record if gate.has_slots else b""
                    self._slots.occupy(each.tag, queue, record, shared)
                continue
            try:
                record = self._store.readable(queue, each.record)
                envelope = open_envelope(record[1:], each.tag)
            except (MessageError, CompressionError):  # it is dealt with when it is opened
                stay.append(each)
                continue
            arrival = Arrival(queue, envelope, record, math.ceil(server_ms), self._store)
            if rules.passes(arrival):
                stay.append(each)
                continue
            ticket = ticketed(rules, arrival, lease.consumer, no_ack)
            if ticket is not None:
                text = ticket.text(gate.version, envelope.id)
                sent.append((each.tag, text, each.record if no_ack else b""))
        if sent:
            self._store.admit(queue, lease.consumer, sent, gate)
        return stay
