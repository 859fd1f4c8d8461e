"""Policies with which the broker itself decides whose turn it is, across all workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from kombu_delayed.inspection.gate_usage import known_as
from kombu_delayed.message.ticket import LimitNumbers, Ticket, Use

from ..message import Message
from ..policy import Policy, PolicyError
from .keys import By

#: The header with the tenant of a task.
TENANT = "tenant"

Kind = Literal["limit", "drain", "shares", "throttler", "undeclared"]


@dataclass(frozen=True)
class Declared:
    """A limit as it was declared, for display. `name` is that of its `LimitNumbers`.

    `by` is what its keys are read from, "" if it has none. `slots` is how many may run at once,
    `rate` how many may start in a period; None and "" if that is not limited. A task that is late
    by `after_ms` or less does not count. `shares` are the slots of each key; "" is all others.
    """

    name: str
    kind: Kind
    task: str = ""
    by: str = ""
    slots: int | None = None
    rate: str = ""
    every_ms: float = 0.0
    burst: int = 1
    after_ms: int = 0
    has_critical: bool = False
    shares: Mapping[str, int] = field(default_factory=dict)
    #: Whether its keys are tenants, read from the header and not made by a function.
    is_of_tenants: bool = False
    #: Whether other queues share it.
    is_global: bool = False

    @property
    def is_settable(self) -> bool:
        """Whether its numbers can be changed at run time."""
        return self.kind in ("limit", "drain")

    @cached_property
    def known_as(self) -> str:
        """The limit's name as it is read back from the gate."""
        return known_as(self.name)

    @cached_property
    def _keys_of_shares(self) -> dict[str, str]:
        return {known_as(self.of_key(key)[0]): key for key in self.shares}

    def of_key(self, key: str) -> tuple[str, str]:
        """Return the limit and the key that the gate uses for a key of this limit."""
        if self.kind == "shares":
            return owned(self.task, share_name(key)), ""
        return self.name, key

    def key_in(self, limit: str, key: str) -> str | None:
        """Reverse `of_key`, for names as they are read back. None: they are another limit's."""
        if self.kind == "shares":
            return self._keys_of_shares.get(limit)
        return key if limit == self.known_as else None


class Gated(Policy):
    """A policy that writes what the broker must know on the ticket of each message."""

    #: Whether it is about turns: a queue has one order of turns for all its tasks.
    is_of_queue = False

    #: Whether its queue must have one shard.
    is_whole = True

    def check_owner(self, owner: str) -> None:
        """Raises PolicyError if a task cannot have it."""
        if owner and self.is_of_queue:
            raise PolicyError(f"task {owner}: {self} is for queues: name it in delayed_policies")

    def limits(self, owner: str) -> Iterable[LimitNumbers]:
        """Return the capacity that messages use. `owner` is the task that has the policy."""
        return ()

    def declared(self, owner: str) -> Iterable[Declared]:
        """Return the same, for display."""
        for each in self.limits(owner):
            slots = each.slots if each.slots > 0 else None
            yield Declared(each.name, "limit", owner, slots=slots, burst=each.burst)

    #: The source of a turn's key, if it gives turns.
    turns_by: By | None = None

    def stamp(self, ticket: Ticket, message: Message, owner: str) -> Ticket:
        """Return the ticket with what this policy adds for a message."""
        return ticket


def owned(owner: str, name: str) -> str:
    """Return the name of a limit of a task, or of the queue."""
    return f"{owner}/{name}" if owner else name


def share_name(key: str) -> str:
    """Return the limit of a key that has its own slots."""
    return f"share {key}"


def is_tenant(by: By | None) -> bool:
    return by == TENANT


def with_uses(ticket: Ticket, *uses: Use) -> Ticket:
    """Return the ticket with these uses added."""
    return replace(ticket, uses=(*ticket.uses, *uses))
