"""Every Redis key of this project is built here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

SEPARATOR = "\x06\x16"


@dataclass(frozen=True)
class QueueKeys:
    """The keys of one queue, with the global key prefix in front of each.

    Kombu's ready list is named `queue`, everything else `{queue}:…`: both hash to one Cluster slot.
    """

    queue: str
    prefix: str = ""
    priority_steps: tuple[int, ...] = (0, 3, 6, 9)
    separator: str = SEPARATOR

    def _tagged(self, name: str) -> str:
        return f"{self.prefix}{{{self.queue}}}:{name}"

    def ready_list(self, step: int) -> str:
        """Kombu's list for a priority step; step 0 is the queue's own name."""
        suffix = f"{self.separator}{step}" if step else ""
        return f"{self.prefix}{self.queue}{suffix}"

    @cached_property
    def ready(self) -> tuple[str, ...]:
        """One list for each priority step, the most urgent first."""
        return tuple(self.ready_list(step) for step in self.priority_steps)

    @cached_property
    def steps(self) -> str:
        """The priority steps as one character each, in the order of `ready`."""
        return "".join(map(step_char, self.priority_steps))

    @cached_property
    def delayed(self) -> str:
        """What the keys of the partitions begin with; each is a sorted set id -> due_ms."""
        return self._tagged("delayed:")

    @cached_property
    def partitions(self) -> str:
        """Sorted set partition -> lower bound of its due times."""
        return self._tagged("partitions")

    @cached_property
    def messages(self) -> str:
        """Hash id -> priority step + due time in ms + message, of all that is delayed."""
        return self._tagged("messages")

    @cached_property
    def duplicates(self) -> str:
        """Hash id -> how many delayed messages share it; ids that are unique are not in it."""
        return self._tagged("duplicates")

    @cached_property
    def unique(self) -> str:
        """Hash unique key -> id of the delayed message that has it."""
        return self._tagged("unique")

    @cached_property
    def unique_due(self) -> str:
        """Sorted set unique key -> when that message was due last."""
        return self._tagged("unique-due")

    @cached_property
    def wake(self) -> str:
        """Sorted set of wake tokens -> when to claim."""
        return self._tagged("wake")

    @cached_property
    def armed(self) -> str:
        """String "due_ms consumer": who has promised to claim at the next due time."""
        return self._tagged("armed")

    @cached_property
    def consumers(self) -> str:
        """Sorted set consumer -> end of its lease."""
        return self._tagged("consumers")

    def unacked(self, consumer: str) -> str:
        """Hash tag -> priority step + message, of one consumer."""
        return self._tagged(f"unacked:{consumer}")

    def held(self, consumer: str) -> str:
        """Sorted set of the tags in a large unacked hash, while they are given back."""
        return self._tagged(f"held:{consumer}")

    @cached_property
    def dead(self) -> str:
        """Sorted set id -> time of burial."""
        return self._tagged("dead")

    @cached_property
    def dead_messages(self) -> str:
        """Hash id -> priority step + message, of the dead letters."""
        return self._tagged("dead-messages")

    @cached_property
    def dead_reasons(self) -> str:
        """Hash id -> JSON: why it was buried, and by whom."""
        return self._tagged("dead-reasons")

    @cached_property
    def events(self) -> str:
        """Stream of lifecycle events."""
        return self._tagged("events")

    def job(self, job_id: str) -> str:
        """Hash id -> what a job has done with it; and counts of each run."""
        return self._tagged(f"job:{job_id}")


def job_report(job_id: str, prefix: str = "") -> str:
    """String: what the last run of a job has done, as JSON."""
    return f"{prefix}kombu-delayed-job:{job_id}"


def job_shards(ledger: str, prefix: str = "") -> str:
    """Hash queue -> over how many shards a job spreads it, whatever others do meanwhile."""
    return f"{prefix}kombu-delayed-job:{ledger}:shards"


def shard_counts(prefix: str = "") -> str:
    """Hash queue -> the most shards that it was spread over; queues of one are not in it."""
    return f"{prefix}kombu-delayed-shards"


def step_char(step: int) -> str:
    """A priority step as the one character that stands in front of a stored message."""
    return chr(48 + step)


def literal(text: str) -> str:
    """Text as a pattern of SCAN that matches nothing else."""
    return re.sub(r"([*?\[\]\\])", r"\\\1", text)
