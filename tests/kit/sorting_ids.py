"""A process whose task ids sort by time: `python -m tests.kit.sorting_ids URL`.

Prints the ids of each way to send, in the order of sending. Each has its own millisecond.
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

LATER = {"countdown": 3600}
COUNT = 5


class Clock:
    """The time module, advanced by a millisecond with each call."""

    def __init__(self) -> None:
        self._ns = itertools.count(time.time_ns(), 1_000_000)

    def time_ns(self) -> int:
        return next(self._ns)


def make_app(url: str) -> Celery:
    app = Celery("sorting", broker=url, backend="cache+memory://", set_as_current=False)

    @app.task(name="add", shared=False, typing=False)
    def add(*args: Any) -> None:
        pass

    for _ in range(2):  # calling it twice is safe
        celery_ext.install(app, task_ids="uuid7")
    return app


def groups(app: Celery) -> list[str]:
    add = app.tasks["add"]
    both = [group([add.s(n) for n in range(COUNT)], app=app) for _ in range(2)]
    return [each.id for header in both for each in header.apply_async(**LATER)]


def chains(app: Celery) -> list[str]:
    """Celery makes the ids of a chain from its end."""
    found = []
    for _ in range(2):
        steps = chain([app.tasks["add"].si(n) for n in range(COUNT)], app=app)
        result = steps.apply_async(**LATER)
        while result:
            found.append(result.id)
            result = result.parent
    return found


def chords(app: Celery) -> list[str]:
    """The ids of the bodies."""
    add = app.tasks["add"]
    headers = [[add.s(n).set(**LATER) for n in range(COUNT)] for _ in range(2)]
    return [chord(header, app=app)(add.s()).id for header in headers]


def schedule_many(app: Celery) -> list[str]:
    """The ids in a backlog that was empty before, by the number that each task was given."""
    rows = [("add", (n,), {}, None, LATER) for n in range(COUNT)]
    report = app.delayed.schedule_many(rows)
    assert report.delayed == COUNT, report
    pages = Backlog(app.delayed.store, "celery").pages()
    kept = ((json.loads(each.kept.message), each.member) for page in pages for each in page)
    found = {message["headers"]["argsrepr"]: id for message, id in kept}
    return [found[name] for name in sorted(found)]


def _each(send: Callable[[int], Any]) -> list[str]:
    return [send(n).id for n in range(COUNT)]


WAYS: dict[str, Callable[[Celery], list[str]]] = {
    "apply_async": lambda app: _each(lambda n: app.tasks["add"].apply_async((n,), **LATER)),
    "send_task": lambda app: _each(lambda n: app.send_task("add", (n,), **LATER)),
    "groups": groups,
    "chains": chains,
    "chords": chords,
}

if __name__ == "__main__":
    ids.time = Clock()  # type: ignore[assignment]
    app = make_app(sys.argv[1])
    found = {"schedule_many": schedule_many(app)} | {way: send(app) for way, send in WAYS.items()}
    found["given"] = [app.send_task("add", task_id="mine", **LATER).id]
    print(json.dumps(found))
