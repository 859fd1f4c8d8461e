"""The periodic tasks of the app, with their next runs."""

from __future__ import annotations

from pydantic import BaseModel

from celery_ext.control.periodic import PeriodicTask, close_old_connections, periodic_tasks

from ..visit import Shown, View, Visit, asked

#: How old a reading may be, and rows on the page.
SECONDS, SHOWN = 5.0, 500


class Asked(BaseModel):
    """A filter for the entries."""

    name: str | None = None


def look(visit: Visit) -> Shown:
    query = asked(visit, Asked)
    found = visit.service.cache.get("periodic", SECONDS, lambda: _read(visit))
    matching = [
        each
        for each in found
        if (query.name or "").lower() in f"{each.name} {each.task}".lower()
        and visit.identity.sees_queue(_queue(visit, each))
    ]
    return {
        "name": query.name or "",
        "tasks": matching[:SHOWN],
        "count": len(matching),
        "queue_of_task": {each.name: _queue(visit, each) for each in matching[:SHOWN]},
    }


def _read(visit: Visit) -> list[PeriodicTask]:
    try:
        return periodic_tasks(visit.service.app)
    finally:
        close_old_connections()  # this thread is long-lived


def _queue(visit: Visit, task: PeriodicTask) -> str:
    return task.queue or str(visit.service.app.conf.task_default_queue)


VIEWS = [View("periodic", "/periodic", "Periodic", look, seconds=10, is_whole=True)]
