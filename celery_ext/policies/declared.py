"""The policies that an app declares: of each queue, and defaults for all of them."""

from __future__ import annotations

from kombu_delayed.consumer.policy.decisions import ALL_QUEUES, Declared

from .limits.gated import Gated
from .policy import Policy, PolicyError, checked
from .retry.strategies import RetryStrategy

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
        self.defaults = self.of_queues.pop(ALL_QUEUES, ())
        for each in self.defaults:
            if isinstance(each, Gated) or each.is_last:
                raise PolicyError(
                    f"{OPTION} of {ALL_QUEUES!r}: {each} is for single queues: name these"
                )

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


def _kind(policy: Policy) -> type[Policy]:
    return RetryStrategy if isinstance(policy, RetryStrategy) else type(policy)
