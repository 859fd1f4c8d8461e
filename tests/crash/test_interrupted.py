"""An error raised at any moment, such as gevent's Timeout or by a signal, ends only that call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import redis
from celery import Celery

import celery_ext
import kombu_delayed
from celery_ext import expect, install
from celery_ext.control.delayed import Delayed
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings, make_app

pytestmark = [
    pytest.mark.crash,
    pytest.mark.thorough,
    # If it interrupts a finalizer of redis-py, Python reports that and continues.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PLACES = tuple(
    str(Path(package.__file__ or "").parent) for package in (celery_ext, kombu_delayed, redis)
)

OPERATIONS: dict[str, Callable[[Celery, Delayed, str], Any]] = {
    "delay": lambda app, delayed, id: app.send_task("noop", task_id=id, countdown=3600),
    "send": lambda app, delayed, id: app.send_task("noop", task_id=id, queue="now"),
    "cancel": lambda app, delayed, id: delayed.cancel(id),
    "get": lambda app, delayed, id: delayed.get(id),
    "expect": lambda app, delayed, id: expect(id, app=app),
}
#: How many moments, spread over its calls, an operation is interrupted at.
MOMENTS = 150


class Interrupt(BaseException):
    """Nothing may catch it."""


def interrupted(operation: Callable[[], Any], at: int, entering: bool = False) -> int:
    """Interrupt it after `at` calls of ours or redis-py's; returns how many calls there were.

    With `entering`, as Python 3.14 alone does it: after `at` locks were taken by a `with` that will
    not release them (python/cpython#148874).
    """
    count = 0

    def watch(frame: FrameType, event: str, of: Any) -> None:
        nonlocal count
        if event not in ("call", "c_return") or not frame.f_code.co_filename.startswith(PLACES):
            return
        if (event == "c_return" and of.__name__ == "__enter__") is entering:
            count += 1
            if count == at:
                raise Interrupt  # it ends the watch, too

    sys.setprofile(watch)
    try:
        operation()
    except Interrupt:
        pass
    finally:
        sys.setprofile(None)
    return count


def use(app: Celery, delayed: Delayed, id: str) -> None:
    app.send_task("noop", task_id=id, countdown=3600)
    found = delayed.get(id)
    assert found is not None
    assert found.id == id
    assert delayed.cancel(id)


@pytest.fixture
def app(server: Server) -> Celery:
    return make_app(Settings(f"delayed+{server.url}"))


@pytest.fixture
def delayed(app: Celery) -> Iterator[Delayed]:
    """A `Delayed` that has been used once."""
    delayed = install(app)
    use(app, delayed, "first")
    yield delayed
    delayed.close()


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interrupted_call(app: Celery, delayed: Delayed, name: str) -> None:
    """Later calls in the same thread and in another one get their own answers."""
    operation = OPERATIONS[name]
    total = interrupted(lambda: operation(app, delayed, "whole"), 0)
    with ThreadPoolExecutor(1) as other:
        for at in range(1, total, max(total // MOMENTS, 1)):
            interrupted(lambda at=at: operation(app, delayed, f"interrupted-{at}"), at)
            use(app, delayed, f"same-{at}")
            other.submit(use, app, delayed, f"other-{at}").result(60)


@pytest.mark.skipif(sys.version_info < (3, 14), reason="a with releases what it has taken")
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_lock_that_stays_locked(app: Celery, delayed: Delayed, name: str) -> None:
    """The thread continues, as after a soft time limit of a task; other threads would wait."""
    operation = OPERATIONS[name]
    total = interrupted(lambda: operation(app, delayed, "whole"), 0, entering=True)
    assert total > 0
    for at in range(1, total + 1):
        interrupted(lambda at=at: operation(app, delayed, f"interrupted-{at}"), at, entering=True)
        use(app, delayed, f"same-{at}")
        operation(app, delayed, f"again-{at}")
