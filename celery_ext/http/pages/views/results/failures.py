"""The outcomes of tasks, failures first: tasks that failed, are retried, run, or were slow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import islice
from typing import Any, Literal

from pydantic import BaseModel

from celery_ext.control.outcomes import TaskFilter, listed
from celery_ext.http.api import cursors
from celery_ext.http.api.endpoints.dead_letters import own_letters
from celery_ext.http.api.fields import Name, Span, span_of
from celery_ext.tasks.history import TaskHistory
from kombu_delayed.store.outcomes.records import LISTS, Outcomes

from ...visit import Form, Shown, View, Visit, asked
from .dead import grouped, letter_name

#: How many tasks are looked at: of all shards, and of each shard at least.
LOOKED_AT, OF_EACH = 5_000, 100

#: How old a reading may be.
SECONDS = 2.0

#: The labels of the lengths of `within`.
WITHIN = {"1h": "the last hour", "6h": "6 hours", "1d": "24 hours", "7d": "7 days"}

#: Groups and tasks on a page.
GROUPS, SHOWN = 30, 50

#: The criteria of a search.
FIELDS = ["queue", "task", "error", "tenant", "worker", "longer_than", "within", "sort"]

#: The keys to sort a list by, and their labels; of tasks with the same key the latest is first.
SORTS: dict[str, Callable[[Row], Any]] = {
    "time": lambda row: 0,
    "task": lambda row: row.history.task,
    "queue": lambda row: row.history.queue,
    "error": lambda row: row.error,
    "attempt": lambda row: -(row.history.last.attempt if row.history.last else 0),
    "run": lambda row: -(row.history.run_seconds or 0),
}
SORT_WORDS = {"time": "time", "run": "run time", "attempt": "attempts"}

TITLES = {"failed": "Failed", "retrying": "Retrying", "running": "Running", "slow": "Slow"}


class Asked(BaseModel):
    """A list, and the criteria for its tasks."""

    of: Literal["failed", "retrying", "running", "slow"] = "failed"
    queue: Name | None = None
    task: Name | None = None
    error: str | None = None
    tenant: Name | None = None
    worker: Name | None = None
    longer_than: Span | None = None
    within: Literal["1h", "6h", "1d", "7d"] | None = None
    sort: Literal["time", "task", "queue", "error", "attempt", "run"] | None = None

    @property
    def since_ms(self) -> int:
        """The earliest time, in ms since the epoch; 0: any time."""
        if self.within is None:
            return 0
        return int((datetime.now(timezone.utc) - span_of(self.within)).timestamp() * 1000)


@dataclass(frozen=True)
class Row:
    """A task of a list."""

    history: TaskHistory

    @property
    def error(self) -> str:
        return self.history.failure.said if self.history.failure else ""

    @property
    def at_ms(self) -> int:
        return self.history.last.at_ms if self.history.last else 0

    @property
    def attempt(self) -> str:
        """The number of the last attempt, and of how many."""
        last, failure = self.history.last, self.history.failure
        most = failure.attempts if failure else None
        return f"{last.attempt if last else 1}{f' of {most}' if most else ''}"

    @property
    def next_ms(self) -> int | None:
        return self.history.last.next_ms if self.history.last else None


def look(visit: Visit) -> Shown:
    query = asked(visit, Asked)
    rows, is_partial = matching(visit, query)
    failures = ((row.history.queue, row.history.task, row.error, row.at_ms) for row in rows)
    groups = grouped(failures) if query.of in ("failed", "retrying") else []
    now_ms = int(datetime.now(timezone.utc).timestamp() * 1000)
    first_ms = min((group.first_ms for group in groups), default=now_ms)
    names = _names(visit, query.of, rows[:SHOWN])
    return {
        "of": query.of,
        "titles": TITLES,
        "filter": {name: value for name in FIELDS if (value := getattr(query, name))},
        "groups": groups[:GROUPS],
        "group_count": len(groups),
        "span": (query.since_ms or first_ms, now_ms),
        "withins": WITHIN,
        "sorts": {name: SORT_WORDS.get(name, name) for name in SORTS},
        "rows": rows[:SHOWN],
        "names": names,
        "may_change": names is not None,
        "count": len(rows),
        "is_partial": is_partial,
        "queues": visit.queues(),
    }


def origin_of(form: Form, path: str, given: dict[str, str]) -> tuple[str, dict[str, str]]:
    """The page with the list that a form belongs to, and the search of that list.

    It is this page, or the one at `path` with the search `given`.
    """
    return ("/failures", form.given(["of", *FIELDS])) if form.one("of") else (path, given)


def matching(visit: Visit, query: Asked) -> tuple[list[Row], bool]:
    """The tasks of a list that match, and whether there are more that were not read."""
    shards = visit.shards(query.queue)
    found, is_partial = _read(visit, query.of, shards, _counts(visit, shards)[query.of])
    chosen = TaskFilter(query.task, query.error, query.worker, query.longer_than)
    rows = [
        row
        for row in map(Row, found)
        if row.at_ms >= query.since_ms
        and query.tenant in (None, row.history.tenant)
        and chosen.matches(row.history)
    ]
    # Of running tasks, the one that has run longest, and so has begun first, is in front.
    rows.sort(key=lambda row: row.at_ms, reverse=query.of != "running")
    rows.sort(key=SORTS[query.sort or ("run" if query.of == "slow" else "time")])
    return rows, is_partial


def recorded(visit: Visit, of: str) -> list[TaskHistory]:
    """The newest tasks of a list in all queues that the visitor may see."""
    shards = visit.shards(None)
    return _read(visit, of, shards, _counts(visit, shards)[of])[0]


def _names(visit: Visit, of: str, rows: list[Row]) -> dict[tuple[str, str], str] | None:
    """The names in forms of the tasks that can be changed.

    None: the visitor may change none, or tasks of this list cannot be changed. Each retrying task
    has a message; of the failed tasks, dead letters can be changed.
    """
    identity, found = visit.identity, dict[tuple[str, str], str]()
    if of == "retrying" and identity.has("schedule"):
        keys = [(row.history.queue, row.history.id) for row in rows]
        return {key: cursors.write(*key) for key in keys}
    if of != "failed" or not identity.has("admin"):
        return None
    for queue in {row.history.queue for row in rows}:
        ids = [row.history.id for row in rows if row.history.queue == queue]
        for _, letters in own_letters(visit, queue, ids):
            found |= {(queue, each.letter.id): letter_name(each) for each in letters}
    return found


def _counts(visit: Visit, shards: list[str]) -> dict[str, dict[str, int]]:
    """How many tasks each list of each shard has at most."""
    outcomes, cache = Outcomes(visit.service.delayed.store), visit.service.cache
    key = ("outcome counts", *shards)
    return cache.get(key, SECONDS, lambda: {of: outcomes.counts(shards, of) for of in LISTS})


def _read(
    visit: Visit, of: str, shards: list[str], counts: dict[str, int]
) -> tuple[list[TaskHistory], bool]:
    """The newest tasks of a list that the visitor may see, and whether there are more."""
    full = [shard for shard in shards if counts.get(shard)]
    if of == "failed":  # tasks whose process died are not in its list yet
        running = _counts(visit, shards)["running"]
        full = [shard for shard in shards if counts.get(shard) or running.get(shard)]
    each = max(LOOKED_AT // max(len(full), 1), OF_EACH)

    def read() -> tuple[list[TaskHistory], bool]:
        delayed = visit.service.delayed
        pages = [[*islice(listed(delayed, of, shard), each)] for shard in full]
        return [one for page in pages for one in page], any(len(page) == each for page in pages)

    found, is_partial = visit.service.cache.get(("outcomes", of, *full), SECONDS, read)
    return [each for each in found if visit.identity.sees(each.queue, each.tenant)], is_partial


def shown_counts(visit: Visit, shards: list[str]) -> dict[str, Any]:
    """How many tasks are in each list, for a visitor who may see all of them."""
    return {of: sum(found.values()) for of, found in _counts(visit, shards).items()}


VIEWS = [View("failures", "/failures", "Failures", look, seconds=5)]
