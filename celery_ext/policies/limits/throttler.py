"""Policies that go by what runs now."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from kombu_delayed.consumer.policy.decisions import Decision
from kombu_delayed.message.ticket import LimitNumbers, Ticket, Use, slot_name

from ..message import Message
from .gated import Declared, Gated, with_uses

_TASK, _TENANT = "running task", "running tenant"


class Running:
    """The running tasks of a queue across all workers, without the message itself."""

    def __init__(self, slots: Mapping[str, int], own: Mapping[str, int] | None = None) -> None:
        counts = dict(slots)
        for name, count in (own or {}).items():
            counts[name] = max(counts.get(name, 0) - count, 0)
        self._counts = counts

    @property
    def total(self) -> int:
        """All of it."""
        prefix = slot_name(_TASK)
        return sum(count for name, count in self._counts.items() if name.startswith(prefix))

    def of_task(self, name: str) -> int:
        """Of one task."""
        return self._counts.get(slot_name(_TASK, name), 0)

    def of_tenant(self, tenant: str) -> int:
        """Of one tenant."""
        return self._counts.get(slot_name(_TENANT, tenant), 0)

    def of_limit(self, name: str, key: str = "") -> int:
        """Slots of a `Limit` of the queue in use by a key."""
        return self._counts.get(slot_name(name, key), 0)


class Throttler(Gated):
    """Base class of policies that decide by the tasks that are running.

    A subclass has `decide(message, running)`. What it delays has no slots meanwhile.
    """

    @abstractmethod
    def decide(self, message: Message, running: Running) -> Decision:  # type: ignore[override]
        """What is to become of a message: Run, Delay, Drop or Bury."""

    def _asked(self, message: Message) -> Decision:
        return self.decide(message, Running(message.running(), message.own_slots()))

    def limits(self, owner: str) -> Iterable[LimitNumbers]:
        return LimitNumbers(_TASK, -1), LimitNumbers(_TENANT, -1)

    def declared(self, owner: str) -> Iterable[Declared]:
        yield Declared(_TASK, "throttler", owner, "task")
        yield Declared(_TENANT, "throttler", owner, "tenant", is_of_tenants=True)

    def stamp(self, ticket: Ticket, message: Message, owner: str) -> Ticket:
        """Have it counted, once."""
        return with_uses(ticket, *[use for use in self._uses(message) if use not in ticket.uses])

    def _uses(self, message: Message) -> tuple[Any, ...]:
        return Use(_TASK, message.task), Use(_TENANT, message.tenant or "")
