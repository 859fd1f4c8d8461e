"""What a process of the crash tests writes into its journal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery.exceptions import Reject, Retry
from kombu.exceptions import OperationalError

from tests.crash.journal import REJECTED, Journal

#: The environment variable with the name under which a worker writes.
WORKER = "KOMBU_DELAYED_TEST_WORKER"
SENDER = "sender"

_journals: list[Journal] = []


@contextmanager
def written_to(journal: Journal) -> Iterator[None]:
    """Until this ends."""
    _journals.append(journal)
    try:
        yield
    finally:
        _journals.remove(journal)


def write(event: str, id: str, retries: int, **facts: Any) -> None:
    for journal in _journals:
        journal.write(event, id=id, retries=retries, **facts)


def write_start(task: Any, **facts: Any) -> None:
    request = task.request
    write(
        "start",
        request.id,
        request.retries,
        late=task.acks_late,
        eta=request.eta,
        redelivered=bool((request.delivery_info or {}).get("redelivered")),
        **facts,
    )


def write_end(task: Any, outcome: str) -> None:
    write("end", task.request.id, task.request.retries, outcome=outcome)


@contextmanager
def running(task: Any, **facts: Any) -> Iterator[None]:
    """The task runs until this ends."""
    write_start(task, **facts)
    outcome = "done"
    try:
        yield
    except Retry:
        outcome = "retried"
        raise
    except Reject as error:
        is_unsent = isinstance(error.reason, OperationalError)
        outcome = REJECTED if error.requeue or is_unsent else repr(error)
        raise
    except BaseException as error:
        outcome = repr(error)
        raise
    finally:
        write_end(task, outcome)
