"""The canvas of a task: the tasks before it, and the tasks that it has led to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from celery_ext.http.api.endpoints.lists.by_state import ready_page
from celery_ext.http.api.endpoints.lists.search import of_root
from celery_ext.http.api.models import Filter
from celery_ext.tasks.history import TaskHistory
from celery_ext.tasks.task_info import TaskInfo
from kombu_delayed.store.outcomes.records import LISTS

from ..visit import Visit
from .results.failures import recorded

#: How many tasks are shown, and how many of each kind are read.
SHOWN, READ = 50, 200


class Kin(NamedTuple):
    """A task of the same canvas."""

    id: str
    task: str
    queue: str
    state: str
    parent_id: str | None


class Ids(NamedTuple):
    """The ids of the first task of a canvas, of the task that sent a task, and of its group."""

    root: str | None
    parent: str | None
    group: str | None

    @classmethod
    def of(cls, id: str, info: TaskInfo | None, record: TaskHistory | None) -> Ids:
        """Read the ids from the message, or else from the record."""
        headers = info.headers if info else {}
        found = [headers.get(name) for name in ("root_id", "parent_id", "group")]
        if record is not None and not any(found):
            found = [record.root_id, record.parent_id, record.group_id]
        root, parent, group = (str(each) if each else None for each in found)
        return cls(root if root != id else None, parent, group)


def look(visit: Visit, root: str, id: str) -> dict[str, Any]:
    """The other tasks of a canvas that wait, run or have failed; children of `id` in front."""
    delayed, has_more = of_root(visit, root, READ)
    ready, following = ready_page(visit, Filter.model_validate({}), READ, None, root)
    kin = {
        each.id: each
        for each in (
            *_recorded(visit, root),
            *map(_waiting, delayed),
            *(_waiting(each.info) for each in ready),
        )
        if each.id != id
    }
    found = sorted(kin.values(), key=lambda each: (each.parent_id != id, each.task, each.id))
    return {
        "tasks": found[:SHOWN],
        "count": len(found),
        "is_partial": has_more or following is not None,
    }


def _waiting(info: TaskInfo) -> Kin:
    state = "retrying" if info.headers.get("retries") and info.state == "delayed" else info.state
    parent = info.headers.get("parent_id")
    return Kin(info.id, info.task, info.queue, state, None if parent is None else str(parent))


def _recorded(visit: Visit, root: str) -> Iterator[Kin]:
    for of in LISTS:
        for each in recorded(visit, of):
            if root in (each.root_id, each.id):
                yield Kin(each.id, each.task, each.queue, each.state, each.parent_id)
