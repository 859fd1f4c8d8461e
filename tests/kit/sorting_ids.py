"""A process of its own whose task ids sort by time: `python -m tests.kit.sorting_ids URL WAY`.

Prints the ids in the order of sending. Each has a millisecond to itself.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from celery import Celery, chain, chord, group

import celery_ext
from celery_ext.app import ids
from kombu_delayed.inspection.backlog import Backlog

COUNTDOWN = 3600
COUNT = 5


class Clock:
    """The time module, a millisecond later each time it is asked."""

    def __init__(self) -> None:
        self._ns = itertools.count(time.time_ns(), 1_000_000)

    def time_ns(self) -> int:
        return next(self._ns)


def make_app(url: str) -> Celery:
    app = Celery("sorting", broker=url, backend="cache+memory://", set_as_current=False)

    @app.task(name="add", shared=False, typing=False)
    def add(*args: Any) -> None:
        pass

    for _ in range(2):  # twice is safe
        celery_ext.install(app, task_ids="uuid7")
    return app


def apply_async(app: Celery) -> list[str]:
    return [app.tasks["add"].apply_async((n,), countdown=COUNTDOWN).id for n in range(COUNT)]


def send_task(app: Celery) -> list[str]:
    return [app.send_task("add", (n,), countdown=COUNTDOWN).id for n in range(COUNT)]


def groups(app: Celery) -> list[str]:
    found = []
    for _ in range(2):
        header = group([app.tasks["add"].s(n) for n in range(COUNT)], app=app)
        found += [each.id for each in header.apply_async(countdown=COUNTDOWN)]
    return found


def chains(app: Celery) -> list[str]:
    """Celery makes the ids of one chain from its end."""
    found = []
    for _ in range(2):
        steps = chain([app.tasks["add"].si(n) for n in range(COUNT)], app=app)
        result = steps.apply_async(countdown=COUNTDOWN)
        while result:
            found.append(result.id)
            result = result.parent
    return found


def chords(app: Celery) -> list[str]:
    """The ids of the bodies."""
    add, found = app.tasks["add"], []
    for _ in range(2):
        header = [add.s(n).set(countdown=COUNTDOWN) for n in range(COUNT)]
        found.append(chord(header, app=app)(add.s()).id)
    return found


def schedule_many(app: Celery) -> list[str]:
    """As they are in the backlog, by the number that each task was given."""
    rows = [("add", (n,), {}, None, {"countdown": COUNTDOWN}) for n in range(COUNT)]
    report = app.delayed.schedule_many(rows)
    assert report.delayed == COUNT, report
    found = {}
    for page in Backlog(app.delayed.store, "celery").pages():
        for each in page:
            headers = json.loads(each.kept.message)["headers"]
            found[headers["argsrepr"]] = each.member
    return [found[name] for name in sorted(found)]


def given(app: Celery) -> list[str]:
    """Who names an id has it."""
    return [app.send_task("add", task_id="mine", countdown=COUNTDOWN).id]


WAYS: dict[str, Callable[[Celery], list[str]]] = {
    way.__name__: way
    for way in (apply_async, send_task, groups, chains, chords, schedule_many, given)
}

if __name__ == "__main__":
    ids.time = Clock()  # type: ignore[assignment]
    print(json.dumps(WAYS[sys.argv[2]](make_app(sys.argv[1]))))
