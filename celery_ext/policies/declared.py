"""The policies that an app declares: of each queue, and defaults for all of them."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from kombu_delayed.consumer.policy.decisions import ALL_QUEUES, Declared

from .limits.gated import Gated
from .policy import Policy, PolicyError, checked
from .retry.strategies import RetryStrategy
from .written import Code, restored, written

#: The transport option that has them, by queue.
OPTION = "delayed_policies"

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
        kinds = {_kind(each) for each in own}
        return (*(each for each in self.defaults if _kind(each) not in kinds), *own)

    def strategy(self, queue: str, task: Policies) -> RetryStrategy | None:
        """The retry strategy of the task, or else of its queue, or else the default one."""
        policies = (*task, *self.of_queue(queue), *self.defaults)
        return next((each for each in policies if isinstance(each, RetryStrategy)), None)


class Followed(NamedTuple):
    """What is declared in Redis for a queue."""

    text: str
    declared: DeclaredPolicies
    tasks: dict[str, Policies]

    @classmethod
    def read(cls, queue: str, text: str, code: Code) -> Followed:
        """Raises PolicyError where something of it cannot be made here."""

        def made(policies: Any) -> Policies:
            return tuple(restored(each, code) for each in policies)

        try:
            found = json.loads(text)
            of_queues = {queue: found.get("queue", ()), ALL_QUEUES: found.get("defaults", ())}
            declared = {name: made(of_queues[name]) for name in of_queues}
            tasks = {name: made(each) for name, each in found.get("tasks", {}).items()}
        except PolicyError:
            raise
        except (ValueError, TypeError, AttributeError) as error:
            raise PolicyError(f"what is declared for it cannot be read: {error}") from error
        return cls(text, DeclaredPolicies(declared), tasks)


def _kind(policy: Policy) -> type[Policy]:
    return RetryStrategy if isinstance(policy, RetryStrategy) else type(policy)
