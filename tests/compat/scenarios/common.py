"""Helpers of the scenarios, each of which runs in its tool's environment, without this tree."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from celery import Celery

#: The broker's URL, the transport beside it or nothing, and Redis for a tool's own client.
BROKER, TRANSPORT, REDIS = (
    os.environ[f"COMPAT_{name}"] for name in ("BROKER", "TRANSPORT", "REDIS")
)
WAIT_SECONDS = 60.0

#: Name of a check -> its function, which fails by an exception.
_checks: dict[str, Callable[[], object]] = {}


def new_app(name: str, **settings: Any) -> Celery:
    """An app on the broker under test, with results in another database of its server."""
    app = Celery(name, broker=BROKER, backend=f"{REDIS.rpartition('/')[0]}/1")
    app.conf.update(broker_transport=TRANSPORT or None, broker_connection_retry_on_startup=True)
    app.conf.update(settings)
    return app


def check(name: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """A decorator for checks that should pass; they run in the order of their code."""

    def keep(function: Callable[[], object]) -> Callable[[], object]:
        _checks[name] = function
        return function

    return keep


def main() -> None:
    """Run the checks and write a file, the first argument: name -> "", or why it fails."""
    found = {}
    for name, function in _checks.items():
        try:
            function()
            found[name] = ""
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            found[name] = f"{type(error).__name__}: {lines[0]}"[:300]
        print(f"{name}: {found[name] or 'works'}", flush=True)
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


def wait_until(predicate: Callable[[], Any], what: str, seconds: float = WAIT_SECONDS) -> Any:
    end = time.monotonic() + seconds
    while not (found := predicate()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.05)
    return found


@contextmanager
def running(*command: str, until: str = "", **variables: str) -> Iterator[Callable[[], str]]:
    """Run a process until the end of the block; it has printed `until` when the block begins."""
    path = Path(f"{command[-1].strip('/').replace('/', '-')[-20:]}-{time.monotonic_ns()}.log")
    with open(path, "wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **variables},
        )

    def printed() -> str:
        return path.read_text(encoding="utf-8", errors="replace")

    def begun() -> bool:
        if process.poll() is not None:
            raise AssertionError(f"it has ended: {(printed().splitlines() or [''])[-1]}")
        return until in printed()

    try:
        wait_until(begun, f"{command[2:6]} prints {until!r}")
        yield printed
    finally:
        process.terminate()
        try:
            process.wait(WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def worker(module: str, *options: str, **variables: str) -> Iterator[Callable[[], str]]:
    """Run a worker of a scenario's app."""
    pool = () if "-P" in options else ("-P", "threads", "-c", "4")
    command = (sys.executable, "-m", "celery", "-A", module, "worker", "-l", "INFO", *pool)
    with running(*command, *options, until=" ready.", **variables) as printed:
        yield printed


def ready(app: Celery, queue: str = "celery") -> int:
    """How many messages of a queue are ready."""
    with app.connection_for_read() as connection:
        return int(connection.default_channel._size(queue))


def empty(app: Celery) -> None:
    app.control.purge()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def get(url: str, data: bytes | None = None) -> str:
    """The answer of an HTTP server. Raises HTTPError."""
    with urllib.request.urlopen(url, data, timeout=30) as answer:
        return str(answer.read().decode())
