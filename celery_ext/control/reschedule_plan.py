"""Where a bulk reschedule moves tasks."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

from ..tasks.task_info import TaskInfo


@dataclass
class Plan:
    """By so much, or to `start_ms`, or evenly over `spread` from there for `count` tasks."""

    by: timedelta | None
    start_ms: int
    spread: timedelta | None
    count: int
    seen: int = 0
    _ahead: set[tuple[str, str]] = field(default_factory=set)

    def next_ms(self, info: TaskInfo) -> int:
        """The due time of the next task, in ms since the epoch."""
        due_ms = self._due_ms(info)
        if due_ms > (info.due_ms or 0):
            self._ahead.add((info.queue, info.member))
        return due_ms

    def _due_ms(self, info: TaskInfo) -> int:
        if self.by is not None:
            return (info.due_ms or 0) + self.by // timedelta(milliseconds=1)
        if self.spread is None:
            return self.start_ms
        share = min(self.seen / max(self.count, 1), 1)
        self.seen += 1
        return self.start_ms + round(self.spread / timedelta(milliseconds=1) * share)

    def was_moved(self, info: TaskInfo) -> bool:
        """Whether it was moved ahead before: it is met again there, once."""
        key = info.queue, info.member
        if key not in self._ahead:
            return False
        self._ahead.remove(key)
        return True
