"""What a consumer does for queues whose messages take turns and have limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from kombu_delayed.connection.native import get_logger
from kombu_delayed.errors import UNREACHABLE, MessageError
from kombu_delayed.message.envelope import open_envelope
from kombu_delayed.message.ticket import OPEN_GATE, Gate
from kombu_delayed.store.store import Store

from .apply import ticketed
from .decisions import Arrival, Rules

if TYPE_CHECKING:
    from ..lease.lease import Lease
    from .slots import Slots

logger = get_logger(__name__)


class Claimed(NamedTuple):
    """A message that was delivered to a consumer."""

    queue: str
    tag: int
    record: bytes


class Gatekeeper:
    """Knows the gates of queues, and sends back to them what came without a ticket."""

    def __init__(self, store: Store, rules: Rules | None, slots: Slots) -> None:
        self._store = store
        self._rules = rules
        self._slots = slots
        #: Queues without a gate at which messages wait, from when they had one.
        self._left: set[str] = set()
        #: Queues for which others declare limits or turns, and this consumer does not.
        self.refused: set[str] = set()
        #: Whether any queue may have a gate or such messages: else nobody need ask.
        self.in_use = rules is not None
        #: Whether the last claim has brought less than was wanted: limits may be why.
        self.was_short = True

    def gate(self, queue: str) -> Gate | None:
        """By what messages leave a queue; None: as they come."""
        gate = self._rules.gate(queue) if self._rules is not None else None
        return OPEN_GATE if gate is None and queue in self._left else gate

    def answered(self, queue: str, gated: bool, refused: bool) -> None:
        """What a claim has said of a gate that this consumer does not declare.

        Messages may wait there since somebody has declared it, or others still do.
        """
        if refused:
            self._refuse(queue)
            return
        self.refused.discard(queue)
        if gated:
            self._left.add(queue)
            self.in_use = True
        elif queue in self._left:
            self._left.discard(queue)
            with suppress(*UNREACHABLE):  # the doctor does not mind empty lanes
                self._store.clear(queue)

    def _refuse(self, queue: str) -> None:
        self._left.discard(queue)
        self.in_use = True
        if queue not in self.refused:
            self.refused.add(queue)
            logger.error(
                "Queue %r has limits or turns that other workers declare and this one does not: it "
                "takes no messages of it as long as one of those is there. Start this worker with "
                "the same delayed_policies, or without this queue",
                queue,
            )

    def let_in(
        self, claimed: Sequence[Claimed], lease: Lease, no_ack: bool, server_ms: float
    ) -> list[Claimed]:
        """Those that may be handed out; the others wait for their turn from now on.

        A message that cannot be read may be handed out, and is buried there.
        """
        if not claimed or self._rules is None:
            return [*claimed]
        queue = claimed[0].queue
        gate = self._rules.gate(queue)
        if gate is None:
            return [*claimed]
        stay: list[Claimed] = []
        sent: list[tuple[int, str, bytes]] = []
        for each in claimed:
            if gate.has_ticket(each.record):
                stay.append(each)
                if gate.has_slots and not no_ack:
                    self._slots.occupy(each.tag, queue)
                continue
            try:
                envelope = open_envelope(each.record[1:], each.tag)
            except MessageError:
                stay.append(each)
                continue
            arrival = Arrival(queue, envelope, each.record, math.ceil(server_ms), self._store)
            if self._rules.passes(arrival):
                stay.append(each)
                continue
            ticket = ticketed(self._rules, arrival, lease.consumer, no_ack)
            if ticket is not None:
                text = ticket.text(gate.version, envelope.id)
                sent.append((each.tag, text, each.record if no_ack else b""))
        if sent:
            self._store.admit(queue, lease.consumer, sent, gate)
        return stay
