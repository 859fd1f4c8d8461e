"""Decisions about a message: when it is sent, and between its delivery and its execution.

This module does not know who decides: `celery_ext.policies` puts itself into `factory` when it is
imported, which every program does that declares a policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from kombu_delayed.connection.native import get_logger
from kombu_delayed.errors import OptionError
from kombu_delayed.message import clock
from kombu_delayed.message.envelope import Envelope, open_envelope
from kombu_delayed.message.ticket import Gate, Ticket, put_ticket
from kombu_delayed.message.wait import Wait
from kombu_delayed.store.store import Entry, Store

logger = get_logger(__name__)


@dataclass(frozen=True)
class Run:
    """The message runs now, with these headers set."""

    headers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Delay:
    """The message waits until a time, in ms since the epoch. Then policies are checked again.

    The policy then finds the `mark` in `Message.marks`.
    """

    until_ms: int
    reason: str
    mark: str = ""


@dataclass(frozen=True)
class Drop:
    """The message is deleted. With `revoked` its result becomes REVOKED.

    With `ends=False` its task continues elsewhere, as with a retry.
    """

    reason: str
    revoked: bool = True
    ends: bool = True


@dataclass(frozen=True)
class Bury:
    """The message becomes a dead letter."""

    reason: str


Decision = Run | Delay | Drop | Bury


class Plan(NamedTuple):
    """The new due time of a message that is being sent, in ms (None: unchanged), and why."""

    due_ms: int | None = None
    reason: str = ""


@dataclass(frozen=True)
class Arrival:
    """A message that has been delivered to this process, at a time by the server's clock."""

    queue: str
    envelope: Envelope
    record: bytes
    server_ms: int
    store: Store
    #: How far the clock of policies is ahead of the server's.
    ahead_ms: int = field(default_factory=lambda: clock.ahead_ms)
    #: When its queue was resumed after a pause, in ms by the server's clock; 0: it was not paused.
    resumed_ms: int = 0

    @property
    def now_ms(self) -> int:
        """The present time by the clock of policies."""
        return self.server_ms + self.ahead_ms

    @property
    def first_due_ms(self) -> int | None:
        """The due time that its sender requested, by the clock of policies; None if unknown."""
        first_ms, wait = self.envelope.first_due_ms, self.envelope.wait
        if first_ms is None or wait.first_due_ms is not None:
            return first_ms
        return first_ms + self.ahead_ms

    @property
    def tag(self) -> int:
        """Its delivery tag."""
        tag: int = self.envelope.payload["properties"]["delivery_tag"]
        return tag

    @property
    def text(self) -> str:
        """The message as it was delivered."""
        return self.record[1:].decode()


class Rules(Protocol):
    """Makes the decisions for all queues of a connection."""

    def plan(self, queue: str, task: str, own: str, at_ms: int) -> Plan | None:
        """Plan a message that is sent to be due at a time; None leaves it unchanged.

        `own` is the header with the policies of the message, empty if it has none.
        """

    def decide(self, arrival: Arrival) -> Decision:
        """Decide about a message that was delivered."""

    def gate(self, queue: str) -> Gate | None:
        """The gate of a queue; None if its messages take no turns and slots."""

    def passes(self, arrival: Arrival) -> bool:
        """Whether a message of a queue that has a gate needs no ticket."""

    def ticket(self, arrival: Arrival) -> Ticket:
        """The ticket of a message, sent or delivered, of a queue that has a gate."""

    def decided(self, arrival: Arrival, decision: Decision) -> None:
        """Note that a message was dropped or buried."""

    def declared(self, queue: str, known: str = "") -> str:
        """The policies to declare for a queue, as JSON: `known`, overridden by its program's."""

    def offered(self, queue: str) -> str:
        """Its program's policies of a queue if every consumer can apply them, else nothing."""

    def follow(self, queue: str, text: str) -> None:
        """Follow the declared policies of a queue from now on. Raises OptionError if it cannot."""


Declared = Mapping[str, Sequence[Any]]

#: Stands for all queues in `delayed_policies`.
ALL_QUEUES = "*"

#: Makes the rules from the transport option `delayed_policies`. Raises OptionError.
factory: Callable[[Declared | None], Rules] | None = None

#: Makes the header of a message from its policies. Raises OptionError.
write: Callable[[Any], str] | None = None

#: The module that sets these when it is imported. Only programs that need it import it.
OWNER = "celery_ext.policies"


def rules_to_follow() -> Rules:
    """Rules for a consumer whose program declares none."""
    import_module(OWNER)
    assert factory is not None
    return factory(None)


def rules_of(declared: Declared | None) -> Rules | None:
    """The rules of a connection; None if there are none. Raises OptionError."""
    if factory is not None:
        return factory(declared)
    for queue, policies in (declared or {}).items():
        for policy in policies:
            raise OptionError(
                f"transport option delayed_policies has {policy!r} for queue {queue!r}, which is "
                "not a policy: use one from celery_ext.policies"
            )
    return None


def planned(rules: Rules, queue: str, task: str, own: str, entry: Entry, store: Store) -> Entry:
    """Apply the rules to a message on its way into a queue: its due time and its ticket."""
    now_ms = clock.now_ms()
    entry = _moved(rules, queue, task, own, entry, now_ms)
    gate = rules.gate(queue)
    return entry if gate is None else _with_ticket(rules, gate, queue, entry, store, now_ms)


def _with_ticket(
    rules: Rules, gate: Gate, queue: str, entry: Entry, store: Store, now_ms: int
) -> Entry:
    record = entry.record.encode()
    try:
        server_ms = now_ms - clock.ahead_ms
        arrival = Arrival(queue, open_envelope(record[1:], 0), record, server_ms, store)
        if rules.passes(arrival):
            return entry
        ticket = rules.ticket(arrival).text(gate.version, entry.id)
    except Exception as error:  # user code may raise anything; the consumer makes another ticket
        logger.warning("Message %s has no ticket for queue %r yet: %s", entry.id, queue, error)
        return entry
    return entry._replace(message=put_ticket(entry.message, ticket))


def _moved(rules: Rules, queue: str, task: str, own: str, entry: Entry, now_ms: int) -> Entry:
    since_ms = now_ms if entry.due[:1] in ("", "+", "0") else clock.ahead_ms
    first_due_ms = since_ms + int(entry.due or 0)
    plan = rules.plan(queue, task, own, max(first_due_ms, now_ms))
    if plan is None:
        return entry
    text = Wait(first_due_ms, plan.reason).put_into(entry.message)
    due = entry.due if plan.due_ms is None else str(plan.due_ms - clock.ahead_ms)
    return entry._replace(message=text, due=due)
