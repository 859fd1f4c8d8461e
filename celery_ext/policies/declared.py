"""The policies that an app declares: of each queue, and defaults for all of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

from kombu_delayed.consumer.policy.decisions import ALL_QUEUES, Declared, Delay
from kombu_delayed.store.policies.declared import PAUSED

from .apps import OPTION, Apps
from .limits.gated import Gated
from .message import Message
from .policy import Policy, PolicyError, checked
from .retry.strategies import RetryStrategy
from .written import Code, restored, written

#: It is looked at so often: in case nobody has let it go when the pause ended.
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
        """What is said of a queue, as plain data: an empty list is said, too."""
        said: dict[str, Policies | None] = {
            "queue": self.of_queues.get(queue),
            "defaults": self.defaults if self._says_defaults else None,
        }
        return {name: [*map(written, each)] for name, each in said.items() if each is not None}

    def of_queue(self, queue: str) -> Policies:
        """Its own ones, without defaults."""
        return self.of_queues.get(queue, ())

    def of(self, queue: str, task: Policies) -> Policies:
        """Those that hold for a task with policies of its own, in the order that they are asked.

        A default holds where neither the queue nor the task has a policy of its kind.
        """
        own = self.of_queue(queue) + task
        return (*_without(self.defaults, own), *own)

    def strategy(self, queue: str, task: Policies, message: Policies = ()) -> RetryStrategy | None:
        """The retry strategy of the message, of its task, of its queue, or the default one."""
        return strategy_in((*message, *task, *self.of_queue(queue), *self.defaults))


class PausedPart(NamedTuple):
    """A pause of the tasks of a name, with * for any text, or of a tenant's. 0: without an end."""

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
        """It is looked at again before the end, as whoever resumes may be interrupted."""
        if 0 < self.until_ms <= now_ms:
            return None
        look_ms = now_ms + LOOK_MS
        return Delay(min(self.until_ms, look_ms) if self.until_ms else look_ms, self.reason)


class Followed(NamedTuple):
    """What is declared in Redis for a queue. Without `tasks` each program's own ones hold."""

    text: str
    declared: DeclaredPolicies
    tasks: dict[str, Policies] | None
    paused: tuple[PausedPart, ...] = ()

    def kept_back(self, message: Message) -> Delay | None:
        """Until when a message waits whose task or tenant is paused; None: it may run."""
        for part in self.paused:
            if part.has(message) and (delay := part.delay(message.now_ms)) is not None:
                return delay
        return None

    @classmethod
    def read(cls, queue: str, text: str, own: DeclaredPolicies, apps: Apps) -> Followed:
        """What is the same as this program's own is that. Raises PolicyError for what it lacks."""
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
            told = found.get("tasks")
            tasks = told and {name: made(each, of_tasks.get(name)) for name, each in told.items()}
            paused = tuple(map(PausedPart.read, found.get("paused", ())))
        except PolicyError:
            raise
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise PolicyError(f"what is declared for it cannot be read: {error}") from error
        return cls(text, DeclaredPolicies(declared), tasks, paused)


def strategy_in(policies: Policies) -> RetryStrategy | None:
    """The first retry strategy of these, which holds."""
    return next((each for each in policies if isinstance(each, RetryStrategy)), None)


def instead_of(message: Policies, others: Policies) -> Policies:
    """The policies of a message, which are asked first, and the others of other kinds."""
    return (*message, *_without(others, message)) if message else others


def _without(policies: Policies, others: Policies) -> Policies:
    """Those of which the others have no kind."""
    kinds = {_kind(each) for each in others}
    return tuple(each for each in policies if _kind(each) not in kinds)


def _kind(policy: Policy) -> type[Policy]:
    return RetryStrategy if isinstance(policy, RetryStrategy) else type(policy)
