"""Opens a claimed message for its consumer, or sends it elsewhere."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

from kombu.utils.uuid import uuid

from ..connection.native import get_logger
from ..errors import CompressionError, MessageError, NotReplicated
from ..message.compressing import MARK
from ..message.envelope import Due, Envelope, PromotedHeaders, due, hide_eta, open_envelope
from ..store.calls import instrumentation
from ..store.store import Entry
from .claiming.sources import ServerClock
from .policy.admission import Claimed
from .policy.apply import rule
from .policy.decisions import Arrival, rules_to_follow
from .policy.of_message import HEADER
from .session import Session

logger = get_logger(__name__)


class Opener:
    """Parks messages that are not due, applies policies, and buries messages it cannot read."""

    def __init__(self, session: Session, clock: ServerClock) -> None:
        self._session = session
        self._store = session.store
        self._qos = session.qos
        self._clock = clock

    def open(self, claimed: Claimed, no_ack: bool) -> dict[str, Any] | None:
        """The message for its consumer, or None if it went elsewhere."""
        queue, tag, record = claimed
        try:
            if MARK in record:
                record = self._expanded(claimed, no_ack)
                claimed = claimed._replace(record=record)
            envelope = open_envelope(record[1:], tag)
        except MessageError as error:
            self._bury(claimed, str(error), no_ack)
            return None
        if envelope.due_ms is None and (when := due(envelope.payload)) is not None:
            at_ms = self._not_yet_due(envelope, when)
            if at_ms is not None:
                self._park(claimed, envelope, at_ms, no_ack)
                return None
        headers, rules = envelope.payload["headers"], self._session.rules
        resumed_ms = self._session.resumed_ms.get(queue, 0)
        if rules is None and HEADER in headers:
            rules = self._session.rules = rules_to_follow()
        if rules is not None:
            now_ms = math.ceil(self._clock.now_ms())
            arrival = Arrival(queue, envelope, record, now_ms, self._store, resumed_ms=resumed_ms)
            if not rule(rules, arrival, self._session.lease.consumer, no_ack):
                self._qos.slots.free(tag)
                return None
        if not no_ack:
            self._qos.held[tag] = queue, envelope.id
        if resumed_ms and isinstance(headers, PromotedHeaders):
            headers.resumed_ms = resumed_ms
        if (meter := instrumentation.current) is not None:
            due_ms = envelope.due_ms
            since_ms = max(due_ms or 0, resumed_ms)
            late_seconds = None if due_ms is None else (self._clock.now_ms() - since_ms) / 1000
            meter.delivered(queue, late_seconds, envelope.deliveries)
        return envelope.payload

    def _expanded(self, claimed: Claimed, no_ack: bool) -> bytes:
        """Decompress a record. Raises CompressionError if this process cannot."""
        queue, _, record = claimed
        try:
            return self._store.dictionaries.readable(queue, record)
        except CompressionError:
            if no_ack:  # nobody would give it back
                self._store.ask("publish", queue, expires_ms=0, records=[record])
            raise

    def _not_yet_due(self, envelope: Envelope, when: Due) -> int | None:
        """When a message is due that a stock producer made ready too early; None: it is due."""
        server_ms = math.ceil(self._clock.now_ms())
        at_ms = server_ms + (when.delay_ms or 0) if when.at_ms is None else when.at_ms
        if at_ms > server_ms:
            return at_ms
        hide_eta(envelope.payload, at_ms)
        return None

    def _park(self, claimed: Claimed, envelope: Envelope, at_ms: int, no_ack: bool) -> None:
        queue, tag, record = claimed
        if no_ack:
            entry = Entry(envelope.id, record[0] - 48, record[1:].decode(), str(at_ms))
            with suppress(NotReplicated):  # only its producer needs to know
                self._store.schedule(queue, [entry])
        else:
            consumer = self._session.lease.consumer
            self._store.park(queue, consumer, [(tag, envelope.id, at_ms)])
        self._qos.slots.free(tag)

    def refuse(self, claimed: Claimed, error: Exception, no_ack: bool) -> None:
        """Bury a message whose body cannot be read, or which its consumer cannot accept."""
        is_known = isinstance(error, MessageError)
        reason = str(error) if is_known else f"its body cannot be read: {error}"
        self._bury(claimed, reason, no_ack)

    def _bury(self, claimed: Claimed, reason: str, no_ack: bool) -> None:
        queue, tag, record = claimed
        logger.error(
            "A message in queue %r becomes a dead letter: %s: %.200r", queue, reason, record
        )
        entry = tag, uuid(), reason, record if no_ack else b""
        self._store.bury(queue, self._session.lease.consumer, [entry])
        self._qos.held.pop(tag, None)
        self._qos.slots.free(tag)
