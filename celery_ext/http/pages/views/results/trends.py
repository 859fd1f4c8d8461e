"""Tasks over time: how many end in which way, how late they begin, how long they run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

from celery_ext.http.api.fields import Name
from kombu_delayed.store.calls.shards import queue_of
from kombu_delayed.store.outcomes.tallies import LEVELS, Slot, Tally, slots

from ...visit import Shown, View, Visit, asked

#: How old a reading may be, and how many shards are read.
SECONDS, READ = 5.0, 500

#: The most rows of a table.
SHOWN = 50

WITHIN = {"hour": "Last hour", "day": "Last day", "week": "Last week"}

#: The same periods on the page of failures.
LATELY = {"hour": "1h", "day": "1d", "week": "7d"}

#: The quantiles that the lines show.
HALF, MOST = 0.5, 0.95


class Row(NamedTuple):
    """The counts of all tasks of one name, or of one queue, in the period."""

    name: str
    tally: Tally

    @property
    def failures(self) -> int:
        return self.tally.end("-")

    @property
    def failed_share(self) -> float:
        """The share of failures among the tasks that have ended for good."""
        return self.failures / max(self.failures + self.tally.end("+"), 1)


#: The labels and keys to sort a table by, the largest first.
SORTS: dict[str, tuple[str, Callable[[Row], Any]]] = {
    "ended": ("runs", lambda row: row.tally.ended),
    "failed": ("failures", lambda row: row.failures),
    "share": ("share of failures", lambda row: row.failed_share),
    "run": ("run time", lambda row: row.tally.run_seconds(MOST) or 0),
    "late": ("lateness", lambda row: row.tally.late_seconds(MOST) or 0),
}


class Asked(BaseModel):
    """The period, and the criteria for tasks."""

    within: Literal["hour", "day", "week"] = "hour"
    queue: Name | None = None
    task: Name | None = None
    sort: Literal["ended", "failed", "share", "run", "late"] = "ended"


def look(visit: Visit) -> Shown:
    query = asked(visit, Asked)
    shards = visit.shards(query.queue)
    now, level = time.time(), LEVELS[query.within]
    found = [
        each
        for each in _read(visit, shards[:READ], query.within)
        if query.task is None or fnmatchcase(each.task, query.task)
    ]
    end = int(now) // level.slot * level.slot
    starts = range(end - level.span + level.slot, end + 1, level.slot)
    parts = {at: Tally() for at in starts}
    for each in found:
        if each.at in parts:
            parts[each.at] += each.tally
    tallies = [*parts.values()]
    return {
        "filter": {name: value for name in ("queue", "task") if (value := getattr(query, name))},
        "within": query.within,
        "withins": WITHIN,
        "lately": LATELY[query.within],
        "sort": query.sort,
        "sorts": {name: words for name, (words, _) in SORTS.items()},
        "starts": [at * 1000 for at in starts],
        "slot_seconds": level.slot,
        "total": sum(tallies, Tally()),
        "ends": {state: [each.end(state) for each in tallies] for state in "+-~"},
        "run": _lines(tallies, Tally.run_seconds),
        "late": _lines(tallies, Tally.late_seconds),
        "tasks": _rows(found, lambda each: each.task, query.sort),
        "by_queue": []
        if query.queue
        else _rows(found, lambda each: queue_of(each.queue), query.sort),
        "is_partial": len(shards) > READ,
        "queues": visit.queues(),
    }


def _read(visit: Visit, shards: list[str], within: str) -> list[Slot]:
    store = visit.service.delayed.store
    return visit.service.cache.get(
        ("trends", within, *shards), SECONDS, lambda: [*slots(store, shards, within, time.time())]
    )


def _lines(
    tallies: Iterable[Tally], of: Callable[[Tally, float], float | None]
) -> dict[float, list[float]]:
    found = [*tallies]
    return {share: [of(each, share) or 0 for each in found] for share in (HALF, MOST)}


def _rows(found: Iterable[Slot], name_of: Callable[[Slot], str], sort: str) -> list[Row]:
    sums: dict[str, Tally] = {}
    for each in found:
        name = name_of(each)
        sums[name] = sums.get(name, Tally()) + each.tally
    rows = sorted(Row(*each) for each in sums.items())
    return sorted(rows, key=SORTS[sort][1], reverse=True)[:SHOWN]


VIEWS = [View("trends", "/trends", "Trends", look, seconds=10, is_whole=True)]
