"""The policies that an app declares: for each queue, and defaults for all of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

from kombu_delayed.consumer.policy.decisions import ALL_QUEUES, Declared, Delay
from kombu_delayed.store.policies.declared import PAUSED, is_undeclared

from .apps import OPTION, Apps
from .limits.gated import Gated
from .message import Message
from .policy import Policy, PolicyError, checked
from .retry.strategies import RetryStrategy
from .written import Code, restored, written

#: How often a paused message is checked, in case it was not released when the pause ended.
LOOK_MS = 600_000

Policies = tuple[Policy, ...]


class DeclaredPolicies:
    """The policies of all queues. Raises PolicyError for those that are invalid."""

    def __init__(self, declared: Declared | None) -> None:
        self.of_queues: dict[str, Policies] = {
            queue: checked(f"{OPTION} of queue {queue!r}", policies)
            for queue, policies in (declared or {}).items()
        }
        self._says_defaults = ALL_QUEUES in self.of_queues
        self.defaults = self.of_queues.pop(ALL_QUEUES, ())
        for each in self.defaults:
            if isinstance(each, Gated) or each.is_last:
                raise PolicyError(
                    f"{OPTION} of {ALL_QUEUES!r}: {each} is for single queues: name these"
                )

    def statement(self, queue: str) -> dict[str, list[dict[str, Any]]]:
        """Return what is declared for a queue, as plain data. An empty list is declared, too."""
        said: dict[str, Policies | None] = {
            "queue": self.of_queues.get(queue),
            "defaults": self.defaults if self._says_defaults else None,
        }
        return {name: [*map(written, each)] for name, each in said.items() if each is not None}

    def of_queue(self, queue: str) -> Policies:
        """Return the policies of a queue itself, without defaults."""
        return self.of_queues.get(queue, ())

    def of(self, queue: str, task: Policies) -> Policies:
        """Return the policies for a task with its own policies, in the order in which to ask them.

        A default applies if neither the queue nor the task has a policy of its kind.
        """
        own = self.of_queue(queue) + task
        return (*_without(self.defaults, own), *own)

    def strategy(self, queue: str, task: Policies, message: Policies = ()) -> RetryStrategy | None:
        """Return the retry strategy of the message, of its task, of its queue, or the default."""
        return strategy_in((*message, *task, *self.of_queue(queue), *self.defaults))


class PausedPart(NamedTuple):
    """A pause of tasks by name, with * for any text, or by tenant. `until_ms` 0: no end."""

    task: str | None
    tenant: str | None
    until_ms: int
    reason: str

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> PausedPart:
        task, tenant = found.get("task"), found.get("tenant")
        what = f"task {task}" if task else f"tenant {tenant}"
        why = f": {found['why']}" if found["why"] else ""
        return cls(task, tenant, found["until_ms"], f"{PAUSED} {what}, by {found['by']}{why}")

    def has(self, message: Message) -> bool:
        if self.task is not None and not fnmatchcase(message.task, self.task):
            return False
        return self.tenant is None or message.tenant == self.tenant

    def delay(self, now_ms: int) -> Delay | None:
        """Delay until a check before the end, as a resume may be interrupted; None if it ended."""
        if 0 < self.until_ms <= now_ms:
            return None
        look_ms = now_ms + LOOK_MS
        return Delay(min(self.until_ms, look_ms) if self.until_ms else look_ms, self.reason)


class Followed(NamedTuple):
    """The declaration in Redis for a queue. Without `tasks`, each program uses its own policies."""

    text: str
    declared: DeclaredPolicies
    tasks: dict[str, Policies] | None
    paused: tuple[PausedPart, ...] = ()

    def kept_back(self, message: Message) -> Delay | None:
        """Return the delay of a message whose task or tenant is paused, or None if it may run."""
        for part in self.paused:
            if part.has(message) and (delay := part.delay(message.now_ms)) is not None:
                return delay
        return None

    @classmethod
    def read(cls, queue: str, text: str, own: DeclaredPolicies, apps: Apps) -> Followed:
        """Read a declaration. Policies equal to this program's own are those objects.

        Raises PolicyError if this program lacks one.
        """
        of_tasks = apps.policies_of_tasks()
        others = chain([own.defaults], own.of_queues.values(), of_tasks.values())
        code = cache(lambda: Code(each for policies in others for each in policies))

        def made(described: Any, mine: Policies | None) -> Policies:
            if mine is not None and [*map(written, mine)] == described:
                return mine
            return tuple(restored(each, code()) for each in described)

        try:
            found = json.loads(text)
            declared = {
                queue: made(found.get("queue", []), own.of_queues.get(queue)),
                ALL_QUEUES: made(found.get("defaults", []), own.defaults),
            }
            tasks = found.get("tasks")
            tasks = tasks and {name: made(each, of_tasks.get(name)) for name, each in tasks.items()}
            paused = tuple(map(PausedPart.read, found.get("paused", ())))
        except PolicyError:
            raise
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise PolicyError(f"what is declared for it cannot be read: {error}") from error
        held = own if is_undeclared(found) else DeclaredPolicies(declared)
        return cls(text, held, tasks, paused)


def strategy_in(policies: Policies) -> RetryStrategy | None:
    """Return the first retry strategy of these, which is the one that applies."""
    return next((each for each in policies if isinstance(each, RetryStrategy)), None)


def instead_of(message: Policies, others: Policies) -> Policies:
    """Return the policies of a message, which are asked first, then those of other kinds."""
    return (*message, *_without(others, message)) if message else others


def _without(policies: Policies, others: Policies) -> Policies:
    """Return the policies whose kind none of the others has."""
    kinds = {_kind(each) for each in others}
    return tuple(each for each in policies if _kind(each) not in kinds)


def _kind(policy: Policy) -> type[Policy]:
    return RetryStrategy if isinstance(policy, RetryStrategy) else type(policy)
