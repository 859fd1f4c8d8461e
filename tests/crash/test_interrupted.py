"""What ends a call at any moment, such as gevent's Timeout or a signal's error, ends only that."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import redis
from celery import Celery

import kombu_delayed
from celery_ext import install
from celery_ext.control.delayed import Delayed
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings, make_app

pytestmark = [
    pytest.mark.crash,
    pytest.mark.thorough,
    # Where it meets a finalizer of redis-py's, Python says so and goes on.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PLACES = tuple(str(Path(package.__file__ or "").parent) for package in (kombu_delayed, redis))

OPERATIONS: dict[str, Callable[[Celery, Delayed, str], Any]] = {
    "delay": lambda app, delayed, id: app.send_task("noop", task_id=id, countdown=3600),
    "send": lambda app, delayed, id: app.send_task("noop", task_id=id, queue="now"),
    "cancel": lambda app, delayed, id: delayed.cancel(id),
    "get": lambda app, delayed, id: delayed.get(id),
}
#: An operation of so many calls is interrupted at about so many of them.
MOMENTS = 150


class Interrupt(BaseException):
    """Nothing may catch it."""


def interrupted(operation: Callable[[], Any], at: int) -> int:
    """Interrupt it after so many calls of ours or redis-py's; returns how many there were."""
    count = 0

    def watch(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(PLACES):
            count += 1
            if count == at:
                raise Interrupt  # which ends the watch, too

    sys.setprofile(watch)
    try:
        operation()
    except Interrupt:
        pass
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interrupted_call(server: Server, name: str) -> None:
    """Others go on, in the same thread and in another one, and are answered what is theirs."""
    app = make_app(Settings(f"delayed+{server.url}"))
    delayed = install(app)
    operation = OPERATIONS[name]

    def use(id: str) -> None:
        app.send_task("noop", task_id=id, countdown=3600)
        found = delayed.get(id)
        assert found is not None
        assert found.id == id
        assert delayed.cancel(id)

    use("first")
    total = interrupted(lambda: operation(app, delayed, "whole"), 0)
    with ThreadPoolExecutor(1) as other:
        for at in range(1, total, max(total // MOMENTS, 1)):
            interrupted(lambda at=at: operation(app, delayed, f"interrupted-{at}"), at)
            use(f"same-{at}")
            other.submit(use, f"other-{at}").result(60)
    delayed.close()
