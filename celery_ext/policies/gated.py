"""Policies by which the broker itself decides whose turn it is, for all workers together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kombu_delayed.gate import LimitNumbers, Ticket, Use

from .message import Message
from .policy import Policy, PolicyError


class Gated(Policy):
    """A policy that writes what the broker has to know on the ticket of each message."""

    #: Whether it is about turns, of which a queue has one order, whatever task a message is of.
    is_of_queue = False

    def check_owner(self, owner: str) -> None:
        """Raises PolicyError where a task cannot have it."""
        if owner and self.is_of_queue:
            raise PolicyError(f"task {owner}: {self} is for queues: name it in delayed_policies")

    def limits(self, owner: str) -> Iterable[LimitNumbers]:
        """How much there is of what messages take; `owner` is the task that has the policy."""
        return ()

    def stamp(self, ticket: Ticket, message: Message, owner: str) -> Ticket:
        """The ticket with what this policy has to say of a message."""
        return ticket


def owned(owner: str, name: str) -> str:
    """The name of a limit of a task, or of the queue."""
    return f"{owner}/{name}" if owner else name


def with_uses(ticket: Ticket, *uses: Use) -> Ticket:
    """The ticket of a message that takes this as well."""
    return replace(ticket, uses=(*ticket.uses, *uses))
