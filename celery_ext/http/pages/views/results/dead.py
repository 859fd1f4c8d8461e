"""Dead letters: groups by task and reason, and the letters of a group."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from glob import escape
from typing import Any

from celery_ext.http.api import cursors
from celery_ext.http.api.endpoints.dead_letters import is_selected, letters_page
from celery_ext.http.api.models import DeadQuery
from celery_ext.http.api.operations import validated
from celery_ext.tasks.dead_task import DeadTask
from kombu_delayed.store.calls.shards import queue_of
from kombu_delayed.store.store import CALL_LIMIT

from ... import sorting
from ...sorting import Order
from ...visit import Form, Shown, View, Visit

#: How many of the newest letters are grouped.
GROUPED = 5_000

#: How old groups may be.
GROUP_SECONDS = 3.0

#: Groups and letters on a page.
GROUPS, PAGE_SIZE = 50, 50

#: The number of bars in the chart of a group.
PARTS = 24

FIELDS = ["queue", "task", "reason"]

#: Fields to sort letters by, and their labels; without one: by queue, the oldest first.
SORTS: sorting.Sorts = {
    "latest": ("time, the latest first", lambda each: -each.letter.at_ms),
    "task": ("task", lambda each: each.info.task),
    "queue": ("queue", lambda each: each.queue),
    "reason": ("reason", lambda each: each.letter.reason),
    "deliveries": ("deliveries", lambda each: -(each.letter.deliveries or 0)),
}

#: The parts of a reason that differ in each letter: ids, addresses, numbers.
_VARIES = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|0x[0-9a-f]+|\d+")


@dataclass
class Group:
    """Tasks of one name in one queue with the same error or reason, apart from numbers in it."""

    queue: str
    task: str
    pattern: str
    example: str
    times: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.times)

    @property
    def first_ms(self) -> int:
        return min(self.times)

    @property
    def last_ms(self) -> int:
        return max(self.times)

    def over_time(self, from_ms: int, to_ms: int) -> list[int]:
        """How many there were in each part of a period."""
        counts = [0] * PARTS
        for at_ms in self.times:
            part = (at_ms - from_ms) * PARTS // max(to_ms - from_ms, 1)
            counts[min(max(part, 0), PARTS - 1)] += 1
        return counts


def grouped(found: Iterable[tuple[str, str, str, int]]) -> list[Group]:
    """Group what has a queue, a task, an error or reason, and a time; the largest group first."""
    groups: dict[tuple[str, str, str], Group] = {}
    for queue, task, why, at_ms in found:
        key = queue, task, pattern_of(why)
        groups.setdefault(key, Group(*key, why)).times.append(at_ms)
    return sorted(groups.values(), key=lambda each: (-each.count, -each.last_ms))


def pattern_of(reason: str) -> str:
    """A reason as a pattern for a search, with `*` for the parts that vary.

    It also has `*` for line breaks and the like: browsers and pages change these in forms.
    """
    kept = "".join(each if each.isprintable() else "*" for each in escape(reason))
    return _VARIES.sub("*", kept)


def letter_name(task: DeadTask) -> str:
    return cursors.write(task.queue, task.letter.id)


def look(visit: Visit) -> Shown:
    params = visit.params()
    cursor = params.get("cursor")
    given = {name: params[name] for name in FIELDS if name in params}
    groups, looked_at, total = _groups(visit, given.get("queue"))
    order = Order.of(visit, SORTS)
    shown: dict[str, Any] = {
        **sorting.shown(order, SORTS),
        "filter": given,
        "groups": groups[:GROUPS],
        "group_count": len(groups),
        "looked_at": looked_at,
        "total": total,
        "queues": visit.queues(),
        "letters": None,
        "next": None,
        "letter_name": letter_name,
        "may_change": visit.identity.has("admin"),
        "is_later": cursor is not None or order.start > 0,
    }
    if order.sort:
        shown |= _sorted(visit, given, order)
    elif given or shown["is_later"]:
        found, following = letters_page(visit, query_of(given, limit=PAGE_SIZE, cursor=cursor))
        shown |= {"letters": [task for _, task in found], "next": following}
    return shown


def _sorted(visit: Visit, given: dict[str, Any], order: Order) -> Shown:
    query = query_of(given)
    shards = visit.shards(query.queue)
    read = [*newest(visit, shards)]
    found = [each for each in read if is_selected(visit, query, each)]
    page, following = order.part(found, SORTS, PAGE_SIZE)
    is_partial = len(read) < sum(map(visit.service.delayed.store.dead.count, shards))
    return {"letters": page, "following": following, "sorted_of": (len(found), is_partial)}


def query_of(given: dict[str, Any], **more: Any) -> DeadQuery:
    """A search by the fields of a form. Raises a Problem that names the fields."""
    return validated(DeadQuery, {**given, **more})


def filter_of(form: Form) -> dict[str, str]:
    return form.given(FIELDS)


def _groups(visit: Visit, queue: str | None) -> tuple[list[Group], int, int | None]:
    """The groups, the number of letters in them, and the number of all letters.

    The latter is None if the visitor may not see all tenants.
    """
    store, shards = visit.service.delayed.store, visit.shards(queue)

    def read() -> tuple[list[Group], int]:
        sees, tenants = visit.identity.sees, visit.identity.tenants
        found = newest(visit, shards)
        letters = [each for each in found if not tenants or sees(each.queue, each.info.tenant)]
        failures = (
            (each.queue, each.info.task, each.letter.reason, each.letter.at_ms) for each in letters
        )
        return grouped(failures), len(letters)

    key = ("groups", queue, visit.identity.tenants, visit.identity.queues)
    found, looked_at = visit.service.cache.get(key, GROUP_SECONDS, read)
    total = None if visit.identity.tenants else sum(map(store.dead.count, shards))
    return found, looked_at, total


def newest(visit: Visit, shards: list[str]) -> Iterator[DeadTask]:
    """The newest letters of some shards, the same number of each."""
    store = visit.service.delayed.store
    each = max(GROUPED // max(len(shards), 1), CALL_LIMIT)
    for shard in shards:
        for at in range(max(store.dead.count(shard) - each, 0), 2**31, CALL_LIMIT):
            ids = store.dead.ids(shard, at, CALL_LIMIT)
            for letter in store.dead.letters(shard, ids):
                yield DeadTask(queue_of(shard), letter)
            if len(ids) < CALL_LIMIT:
                break


VIEWS = [View("dead", "/dead", "Dead letters", look, seconds=5)]
