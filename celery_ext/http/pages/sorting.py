"""Lists in the order that a visitor chooses, of the first ones that match."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from ..problems import Problem
from .visit import Shown, Visit

T = TypeVar("T")

#: So many are read and sorted, and for so long it is read.
SORTED, LOOK_SECONDS = 2_000, 2.0

#: Sorts of a list: what each is called, and what it is by.
Sorts = Mapping[str, tuple[str, Callable[[Any], Any]]]


class Order(NamedTuple):
    """How a list is asked for: by which of its sorts, from which place on."""

    sort: str
    start: int

    @classmethod
    def of(cls, visit: Visit, sorts: Sorts) -> Order:
        """As the address says it. Raises a Problem."""
        params = visit.params()
        sort, start = params.get("sort", ""), params.get("start", "0")
        if sort and sort not in sorts:
            raise Problem.of_field("sort", f"it is one of {', '.join(sorts)}")
        if not start.isdecimal() or len(start) > 6:
            raise Problem.of_field("start", "it is not a place in the list")
        return cls(sort, int(start))

    def part(self, found: Sequence[T], sorts: Sorts, size: int) -> tuple[list[T], int | None]:
        """A page of it, and where the next one begins; None: this is the last."""
        ordered = sorted(found, key=sorts[self.sort][1])
        end = self.start + size
        return ordered[self.start : end], end if end < len(ordered) else None


def read_first(
    read: Callable[[int, str | None], tuple[Sequence[T], str | None]],
) -> tuple[list[T], bool]:
    """The first ones of a search, and whether there are more."""
    found, cursor, until = list[T](), None, time.monotonic() + LOOK_SECONDS
    while True:
        part, cursor = read(min(SORTED - len(found), 1_000), cursor)
        found += part
        if cursor is None or len(found) >= SORTED or time.monotonic() > until:
            return found, cursor is not None


def shown(order: Order, sorts: Sorts) -> Shown:
    """What templates need of the order of a list."""
    return {
        "sort": order.sort,
        "sorts": {name: words for name, (words, _) in sorts.items()},
        "following": None,
        "is_later": order.start > 0,
        "sorted_of": None,
    }
