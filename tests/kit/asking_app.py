"""The app for workers in tests, with tasks that ask."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from celery import chain, group
from celery.signals import before_task_publish

from celery_ext import expect, install
from celery_ext.app.signals import expectation_ended
from tests.kit.tasks_app import Settings, make_app, write_down

app = make_app(Settings.from_environment())
install(app)


def die_once(where: str) -> None:
    """Kill this process as the kernel does when memory runs out, but only the first caller."""
    mark = Path(f"{app.conf.ledger}.{where}")
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


@app.task(bind=True, name="note", acks_late=True, reject_on_worker_lost=True)
def note(self: Any, *args: Any) -> list[Any]:
    write_down(self, args=args, tenant=(self.request.headers or {}).get("tenant"))
    return [*args]


@app.task(bind=True, name="ask")
def ask(self: Any, key: str, timeout: float = 3600, shape: str = "task") -> str:
    shapes = {
        "task": note.s("response"),
        "chain": chain(note.s("first"), note.s("second")),
        "group": group(note.s("one"), note.s("two")),
        "unsendable": note.s("response").set(serializer="unknown"),
    }
    expectation = expect(
        key,
        timeout=timeout,
        on_response=shapes[shape],
        on_timeout=note.s("timeout"),
        on_failure=note.s("failure"),
    )
    return expectation.id


@app.task(name="ask_for_result")
def ask_for_result(key: str, timeout: float = 3600) -> None:
    """Its result is the answer."""
    expect(key, timeout=timeout, as_result=True)


@app.task(bind=True, name="ask_and_die", acks_late=True, reject_on_worker_lost=True)
def ask_and_die(self: Any, key: str) -> str:
    """Is killed the first time, after it has asked."""
    expectation = expect(key, on_response=note.s("response"), on_timeout=note.s("timeout"))
    die_once("asking")
    return expectation.state


@before_task_publish.connect
def _before_sending(sender: str, body: Any, **_: Any) -> None:
    if sender == "note" and body[0] and str(body[0][0]).startswith("die before"):
        die_once("before")


@expectation_ended.connect
def _after_sending(key: str, **_: Any) -> None:
    if key.startswith("die after"):
        die_once("after")
