"""Carries out the decision about a delivered message, with one move each."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any

from kombu_delayed.connection.native import get_logger
from kombu_delayed.errors import NotReplicated
from kombu_delayed.message.envelope import escaped
from kombu_delayed.message.ticket import Ticket, slots_in
from kombu_delayed.message.wait import Wait
from kombu_delayed.store.store import Entry

from .decisions import Arrival, Bury, Delay, Drop, Rules, Run

logger = get_logger(__name__)

#: The shortest time between two decisions about the same message.
SHORTEST_DELAY_MS = 50

#: Whole numbers of this size are exact in Lua.
LATEST_MS = 2**53 - 1

#: After a policy has failed on a message it is asked again, after twice as long each time.
FIRST_ERROR_MS, LONGEST_ERROR_MS = 1_000, 60_000


def rule(rules: Rules, arrival: Arrival, consumer: str, no_ack: bool) -> bool:
    """Decide about a delivered message and carry it out; returns whether it is to run."""
    envelope = arrival.envelope
    errors = envelope.wait.errors
    try:
        found = rules.decide(arrival)
        if isinstance(found, Run):
            envelope.payload["headers"].update(found.headers)
            return True
        decision: Delay | Drop | Bury = _checked(found)
    except Exception as error:  # user code may raise anything; the broker's errors come again
        errors += 1
        decision = _failed(arrival, errors, error)
    wait = replace(envelope.wait, first_due_ms=arrival.first_due_ms, errors=errors)
    if isinstance(decision, Delay):
        _delay(arrival, decision, wait, consumer, no_ack)
    elif isinstance(decision, Drop):
        record, tag = arrival.record if no_ack else b"", arrival.tag
        arrival.store.drop(arrival.queue, consumer, tag, decision.reason, record, decision.ends)
    else:
        _bury(arrival, decision, wait, consumer)
    _refund(rules, arrival)
    if not isinstance(decision, Delay):
        rules.decided(arrival, decision)
    return False


def _refund(rules: Rules, arrival: Arrival) -> None:
    """Give back the rate tokens that a message has taken at the gate and does not need."""
    gate, store = rules.gate(arrival.queue), arrival.store
    if gate is None or not gate.has_rates or not (uses := slots_in(arrival.record)):
        return
    given = {
        "limits": gate.numbers,
        "due_ms": arrival.envelope.due_ms or arrival.server_ms,
        "uses": [*chain.from_iterable(uses.items())],
    }
    store.post(*store.call("refund", arrival.queue, **given), on_error=lambda: None)


def ticketed(rules: Rules, arrival: Arrival, consumer: str, no_ack: bool) -> Ticket | None:
    """The ticket of a delivered message; None if it cannot have one, and waits or is buried."""
    wait = arrival.envelope.wait
    try:
        return rules.ticket(arrival)
    except Exception as error:  # a user's code may raise anything
        wait = replace(wait, first_due_ms=arrival.first_due_ms, errors=wait.errors + 1)
        decision = _failed(arrival, wait.errors, error)
    if isinstance(decision, Delay):
        _delay(arrival, decision, wait, consumer, no_ack)
    else:
        _bury(arrival, decision, wait, consumer)
        rules.decided(arrival, decision)
    return None


def _checked(decision: Any) -> Delay | Drop | Bury:
    """Check a decision of user code, and return it in forms that the server takes."""
    if not isinstance(decision, (Delay, Drop, Bury)):
        raise TypeError(f"a policy must return Run, Delay, Drop or Bury, not {decision!r}")
    reason = escaped(str(decision.reason))
    if isinstance(decision, Delay):
        until_ms = min(int(decision.until_ms), LATEST_MS)
        return Delay(until_ms, reason, str(decision.mark))
    return replace(decision, reason=reason)


def _failed(arrival: Arrival, count: int, error: Exception) -> Delay | Bury:
    """Delay or bury a message whose policies failed: neither lose it nor retry it constantly."""
    reason = escaped(f"its policies have failed: {type(error).__name__}: {error}")
    logger.error(
        "Message %s in queue %r waits: %s",
        arrival.envelope.id,
        arrival.queue,
        reason,
        exc_info=error,
    )
    limit = arrival.store.limits.max_deliveries
    if limit and count >= limit:
        return Bury(f"{count} times {reason}")
    delay_ms = min(FIRST_ERROR_MS * 2 ** min(count - 1, 16), LONGEST_ERROR_MS)
    return Delay(arrival.now_ms + delay_ms, reason)


def _delay(arrival: Arrival, decision: Delay, wait: Wait, consumer: str, no_ack: bool) -> None:
    id, step, queue = arrival.envelope.id, arrival.record[0] - 48, arrival.queue
    marks = wait.marks
    if decision.mark and decision.mark not in marks:
        marks = (*marks, decision.mark)
    wait = replace(wait, reason=decision.reason, marks=marks)
    due_ms = max(decision.until_ms - arrival.ahead_ms, arrival.server_ms + SHORTEST_DELAY_MS)
    if no_ack:
        entry = Entry(id, step, wait.put_into(arrival.text), str(due_ms))
        with suppress(NotReplicated):  # only its producer needs to know
            arrival.store.schedule(queue, [entry])
    else:
        arrival.store.park(queue, consumer, [(arrival.tag, id, due_ms)], wait)


def _bury(arrival: Arrival, decision: Bury, wait: Wait, consumer: str) -> None:
    text = replace(wait, reason=decision.reason).put_into(arrival.text)
    record = arrival.record[:1] + text.encode()
    entry = arrival.tag, arrival.envelope.id, decision.reason, record
    arrival.store.bury(arrival.queue, consumer, [entry])
