"""Journals outside of the server: each process appends its events to a file of its own."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from celery.exceptions import Reject, Retry
from kombu.exceptions import OperationalError

from kombu_delayed.errors import NotReplicated

Line = dict[str, Any]

#: The outcome of a run whose message goes back to its queue.
REJECTED = "rejected"

#: The environment variable with the name under which a worker writes.
WORKER = "KOMBU_DELAYED_TEST_WORKER"
SENDER = "sender"

_journals: list[Journal] = []


class Journal:
    """Appends one JSON object a line; each process that writes has a file of its own."""

    def __init__(self, directory: Path, owner: str) -> None:
        self._directory = directory
        self._owner = owner
        self._pid = 0
        self._descriptor = -1

    def write(self, event: str, **facts: Any) -> None:
        line = {"event": event, "at": time.time(), "monotonic": time.monotonic(), **facts}
        # One write of an O_APPEND descriptor: a kill leaves the whole line or nothing.
        os.write(self._file(), json.dumps(line).encode() + b"\n")

    def _file(self) -> int:
        if self._pid != os.getpid():
            path = self._directory / f"{self._owner}-{os.getpid()}.journal"
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            self._pid = os.getpid()
        return self._descriptor


class Reader:
    """Reads all journals of a directory, each time the new lines only."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[Path, int] = {}

    def new_lines(self) -> Iterator[Line]:
        """Lines with their `owner` and `pid`, in the order of each file."""
        for path in sorted(self._directory.glob("*.journal")):
            owner, _, pid = path.stem.rpartition("-")
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.splitlines():
                yield {**json.loads(line), "owner": owner, "pid": int(pid)}


@contextmanager
def written_to(journal: Journal) -> Iterator[None]:
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
    write_start(task, **facts)
    outcome = "done"
    try:
        yield
    except Retry:
        outcome = "retried"
        raise
    except Reject as error:
        is_unsent = isinstance(error.reason, OperationalError | NotReplicated)
        outcome = REJECTED if error.requeue or is_unsent else repr(error)
        raise
    except BaseException as error:
        outcome = repr(error)
        raise
    finally:
        write_end(task, outcome)
