"""A dead letter, as the task that it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from kombu_delayed.store.dead_letters import DeadLetter

from .failures import Failure, read
from .task_info import TaskInfo
from .times import from_ms


@dataclass(frozen=True)
class DeadTask:
    """A task that was buried, with the reason; `letter` has its message."""

    queue: str
    letter: DeadLetter

    @property
    def info(self) -> TaskInfo:
        letter = self.letter
        return TaskInfo(
            "dead",
            self.queue,
            0,
            letter.message,
            consumer=letter.consumer,
            reason=letter.reason,
            member=letter.id,
            counted=letter.deliveries,
        )

    @property
    def at(self) -> datetime:
        """When it was buried, in UTC."""
        return from_ms(self.letter.at_ms)

    @property
    def failures(self) -> Sequence[Failure]:
        """The last attempts of a task that its retry strategy has given up."""
        return read(self.letter.failures)
