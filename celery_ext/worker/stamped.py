"""Delayed tasks with a stamp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kombu.utils.functional import maybe_list

from ..tasks.query import Query, longest_plain
from ..tasks.task_info import TaskInfo


@dataclass(frozen=True)
class StampQuery(Query):
    """Delayed tasks that were stamped under `stamp` with one of `values`."""

    stamp: str = ""
    values: frozenset[str] = frozenset()

    @classmethod
    def of(cls, stamp: str, values: Any) -> StampQuery:
        """`values` are one or several, as for `revoke_by_stamped_headers`."""
        return cls(stamp=stamp, values=_texts(values))

    @property
    def needle(self) -> str:
        """Text that every message has that is meant."""
        return longest_plain([self.stamp, *(self.values if len(self.values) == 1 else ())])

    def matches(self, info: TaskInfo) -> bool:
        """Whether it has one of the stamps."""
        stamps = info.headers.get("stamps")
        found = stamps.get(self.stamp) if isinstance(stamps, dict) else None
        return not self.values.isdisjoint(_texts(found))


def _texts(values: Any) -> frozenset[str]:
    return frozenset(str(each) for each in maybe_list(values) or ())
