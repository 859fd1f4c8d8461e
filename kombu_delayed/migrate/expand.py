"""Compressed messages on their way to the stock transport, which cannot read them."""

from __future__ import annotations

from collections.abc import Iterator

from ..inspection.ready.lists import ReadyLists
from .migration import Migration


def expand_steps(migration: Migration, queue: str) -> Iterator[int]:
    """Write a queue's ready messages as they were; yields how many each step has seen.

    Each is there all the time, in one form or the other.
    """
    store = migration.store
    lists = ReadyLists(store, queue)
    for step in lists.steps:
        start, has_more = 0, not migration.dry
        while has_more:
            looked_at, has_more, page = lists.page(step, start)
            lists.expand([each for each in page if each.compressed])
            start += looked_at
            yield 0
