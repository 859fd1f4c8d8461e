"""Django's own tasks for tests; the signals that a worker sends for them go to a ledger.

KOMBU_DELAYED_TEST_LEDGER   the file
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from django.tasks import TaskContext, task
from django.tasks.signals import task_finished, task_started

from tests.kit.ledger import Ledger

LEDGER = "KOMBU_DELAYED_TEST_LEDGER"


def _write_down(signal: Any, sender: Any, task_result: Any, **kwargs: Any) -> None:
    ledger = Ledger(Path(os.environ.get(LEDGER, os.devnull)))
    signal = "started" if signal is task_started else "finished"
    ledger.append(id=task_result.id, signal=signal, status=task_result.status)


for each in (task_started, task_finished):
    each.connect(_write_down, weak=False)


@task(queue_name="reports")
def add(x: int, y: int = 0) -> int:
    return x + y


@task(queue_name="reports")
async def add_async(x: int, y: int) -> int:
    return x + y


@task(queue_name="reports")
def fail(text: str) -> None:
    raise LookupError(text)


@task(queue_name="reports")
def fail_elsewhere() -> None:
    """Raises an error that only the worker has imported."""
    import mailbox

    raise mailbox.NoSuchMailboxError("post")


@task(queue_name="reports")
def return_an_object() -> object:
    return object()


@task(queue_name="reports", takes_context=True)
def attempt(context: TaskContext) -> list[Any]:
    return [context.attempt, context.task_result.id]


@task
def plain() -> None:
    pass


def _twice(x: int) -> int:
    return 2 * x


another_name = task(_twice)
