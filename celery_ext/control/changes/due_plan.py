"""The due times of a bulk reschedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from ...errors import QueryError
from ...tasks.task_info import TaskInfo
from ...tasks.times import Length, from_now_ms, to_length, to_ms
from .moves import Moves, due_at
from .ready import ReadyTask


@dataclass
class DuePlan:
    """Moves tasks by a length of time, or to `start_ms`, or evenly over `spread` from there.

    `count` is the number of tasks to spread.
    """

    moves: Moves
    now_ms: int
    by: timedelta | None
    start_ms: int
    spread: timedelta | None
    count: int = 0
    seen: int = 0
    _ahead: set[tuple[str, str]] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        moves: Moves,
        by: Length | None,
        to: datetime | str | None,
        spread: Length | None,
    ) -> DuePlan:
        """Raises QueryError for an invalid combination or an invalid length of time."""
        if (by is None) == (to is None and spread is None):
            raise QueryError("reschedule_many takes by=, or to= and spread=, or one of these two")
        now_ms = from_now_ms("to", 0)
        start_ms = now_ms if to is None else to_ms("to", to)
        period = to_length("spread", spread)
        if period is not None and period < timedelta(0):
            raise QueryError(f"spread is a length of time from 0 on, not {spread!r}")
        return cls(moves, now_ms, to_length("by", by), start_ms, period)

    def delayed(self, shard: str, infos: list[TaskInfo]) -> int:
        """Move delayed tasks of a shard; returns how many were still there."""
        return self.moves.reschedule(shard, infos, [due_at(self._next_ms(i)) for i in infos])

    def ready(self, tasks: Sequence[ReadyTask]) -> int:
        """Delay ready tasks; returns how many were still ready. Raises QueryError for the past."""
        dues = [self._due_ms(replace(each.info, due_ms=self.now_ms)) for each in tasks]
        if any(due_ms <= self.now_ms for due_ms in dues):
            raise QueryError("tasks that are ready can only be moved to a later time")
        return self.moves.postpone_all(tasks, map(due_at, dues))

    def _next_ms(self, info: TaskInfo) -> int:
        """The due time of a delayed task, in ms since the epoch."""
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
        """Returns whether a task was moved ahead before. It is then met again there, once."""
        key = info.queue, info.member
        if key not in self._ahead:
            return False
        self._ahead.remove(key)
        return True
