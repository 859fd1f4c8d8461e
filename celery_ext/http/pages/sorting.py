"""Sorts the first items of a list that match, in the order that a visitor chooses."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from ..problems import Problem
from .visit import Shown, Visit

T = TypeVar("T")

#: How many items are read and sorted, and how long the reading may take.
SORTED, LOOK_SECONDS = 2_000, 2.0

#: The sort orders of a list: the label and the key of each.
Sorts = Mapping[str, tuple[str, Callable[[Any], Any]]]


class Order(NamedTuple):
    """The requested sort order of a list, and the place where the page begins."""

    sort: str
    start: int

    @classmethod
    def of(cls, visit: Visit, sorts: Sorts) -> Order:
        """Read the order from the address. Raises a Problem if it is invalid."""
        params = visit.params()
        sort, start = params.get("sort", ""), params.get("start", "0")
        if sort and sort not in sorts:
            raise Problem.of_field("sort", f"it is one of {', '.join(sorts)}")
        if not start.isdecimal() or len(start) > 6:
            raise Problem.of_field("start", "it is not a place in the list")
        return cls(sort, int(start))

    def part(self, found: Sequence[T], sorts: Sorts, size: int) -> tuple[list[T], int | None]:
        """A page of the sorted list, and where the next one begins; None: this is the last."""
        ordered = sorted(found, key=sorts[self.sort][1])
        end = self.start + size
        return ordered[self.start : end], end if end < len(ordered) else None


def read_first(
    read: Callable[[int, str | None], tuple[Sequence[T], str | None]], most: int, seconds: float
) -> tuple[list[T], bool]:
    """The first items of a search that are found in some seconds, and whether there are more."""
    found, cursor, until = list[T](), None, time.monotonic() + seconds
    while True:
        part, cursor = read(min(most - len(found), 1_000), cursor)
        found += part
        if cursor is None or len(found) >= most or time.monotonic() > until:
            return found, cursor is not None


def shown(order: Order, sorts: Sorts) -> Shown:
    """The values that templates need for the order of a list."""
    return {
        "sort": order.sort,
        "sorts": {name: words for name, (words, _) in sorts.items()},
        "following": None,
        "is_later": order.start > 0,
        "sorted_of": None,
    }
