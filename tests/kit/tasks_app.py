"""A Celery app for tests. Environment variables configure its worker processes.

KOMBU_DELAYED_TEST_APP      JSON: the fields of `Settings`
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from celery import Celery, Task
from celery.exceptions import Reject
from celery.signals import worker_shutting_down
from kombu.exceptions import OperationalError

from kombu_delayed.errors import NotReplicated
from tests.kit.ledger import Ledger

VARIABLE = "KOMBU_DELAYED_TEST_APP"


@dataclass(frozen=True)
class Settings:
    """Where the app's messages, results and ledger are."""

    broker_url: str | None = None
    result_backend: str | None = None
    transport_options: dict[str, Any] = field(default_factory=dict)
    ledger: str = os.devnull
    config: dict[str, Any] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Settings:
        return cls(**json.loads(os.environ.get(VARIABLE, "{}")))


class FlakyError(Exception):
    """Raised by tasks that should be retried."""


_tasks: list[tuple[Callable[..., Any], dict[str, Any]]] = []


def task(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        _tasks.append((function, options))
        return function

    return decorate


def make_app(settings: Settings) -> Celery:
    app = Celery("tests", set_as_current=False)
    app.conf.update(
        broker_transport_options=settings.transport_options,
        broker_connection_retry_on_startup=True,
        broker_connection_retry_delay=0.1,
        result_backend=settings.result_backend,
        result_expires=600,
        worker_hijack_root_logger=True,
        ledger=settings.ledger,
        **{"delayed_expectations": {}, **settings.config},
    )
    if settings.broker_url:
        app.conf.broker_url = settings.broker_url
    for function, options in _tasks:
        # Shared tasks would also appear in the apps of other tests.
        app.task(name=function.__name__, shared=False, **options)(function)
    return app


def write_down(task: Any, **more: Any) -> None:
    request = task.request
    info = request.delivery_info or {}
    Ledger(Path(task.app.conf.ledger)).append(
        task=task.name,
        id=request.id,
        at=time.time(),
        eta=request.eta,
        retries=request.retries,
        redelivered=bool(info.get("redelivered")),
        priority=info.get("priority"),
        worker=request.hostname,
        pid=os.getpid(),
        **more,
    )


@task()
def add(x: int, y: int) -> int:
    return x + y


@task()
def total(numbers: list[int]) -> int:
    return sum(numbers)


@task()
def noop() -> None:
    pass


@task(bind=True)
def record(self: Any, *args: Any) -> str | None:
    write_down(self, args=args)
    return self.request.eta


@task(bind=True)
def sleep(self: Any, seconds: float) -> None:
    write_down(self)
    time.sleep(seconds)


@task(bind=True)
def until(self: Any, path: str) -> None:
    """Run until the file exists."""
    write_down(self)
    while not Path(path).exists():
        time.sleep(0.02)


@task(bind=True, acks_late=True)
def torn(self: Any) -> None:
    """Take a lock and keep it, as if a signal had interrupted the handler of another one."""
    worker_shutting_down.lock.acquire()
    write_down(self)
    time.sleep(30)


@task(bind=True, acks_late=True)
def late(self: Any, seconds: float = 0, payload: str = "") -> None:
    """Is acked when it is done; records start and end."""
    write_down(self, phase="start")
    time.sleep(seconds)
    write_down(self, phase="end")


@task(bind=True, acks_late=True)
def late_until(self: Any, path: str) -> None:
    """As `late`, until the file exists."""
    write_down(self, phase="start")
    while not Path(path).exists():
        time.sleep(0.02)
    write_down(self, phase="end")


@task(bind=True, acks_late=True)
def busy(self: Any, seconds: float, how: str) -> None:
    """Keeps its thread busy, in Python or asleep in native code; records start and end."""
    write_down(self, phase="start")
    if how == "native":
        ctypes.CDLL(None).usleep(int(seconds * 1e6))  # without the GIL
    else:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass
    write_down(self, phase="end")


@task(bind=True)
def fill_memory(self: Any, mebibytes: int) -> None:
    """Its process needs this much memory for a moment."""
    assert len(b"x" * (mebibytes << 20))
    write_down(self)


@task(bind=True, acks_late=True)
def out_of_memory(self: Any) -> None:
    write_down(self)
    raise MemoryError


@task(bind=True, max_retries=5)
def retry(self: Any, countdown: float, times: int = 1) -> str | None:
    write_down(self)
    if self.request.retries < times:
        raise self.retry(countdown=countdown)
    return self.request.eta


class UnspeakableError(Exception):
    """An error that cannot be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@task(bind=True)
def unspeakable(self: Any) -> None:
    write_down(self)
    raise UnspeakableError


@task(acks_late=True)
def reject_unspeakable() -> None:
    raise Reject(UnspeakableError())


@task(acks_late=True, acks_on_failure_or_timeout=False)
def fail_kept(how: str) -> None:
    """Becomes a dead letter if it fails."""
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("no hope") if how == "fail" else UnspeakableError


@task(bind=True, acks_late=True)
def die(self: Any) -> None:
    write_down(self)
    os.kill(os.getpid(), signal.SIGKILL)


class DiesAtItsEnd(Task):
    """A task whose process is gone after its result is stored."""

    abstract = True

    def on_success(self, *result: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@task(base=DiesAtItsEnd, acks_late=True, reject_on_worker_lost=True)
def die_at_the_end() -> None:
    pass


@task(
    bind=True,
    autoretry_for=(FlakyError,),
    retry_backoff=1,
    retry_jitter=False,
    max_retries=3,
)
def backoff(self: Any, failures: int) -> int:
    """Fails `failures` times, retried after 1, 2, 4 … seconds."""
    write_down(self)
    if self.request.retries < failures:
        raise FlakyError
    return self.request.retries


@task(bind=True, acks_late=True)
def reject(self: Any, requeue_first: bool = False) -> None:
    """Rejects its message; the first time back into the queue if asked for."""
    write_down(self)
    again = requeue_first and not (self.request.delivery_info or {}).get("redelivered")
    raise Reject("on purpose", requeue=again)


@task(bind=True)
def hand_on(self: Any, then: str, countdown: float | None, queue: str) -> None:
    """Fails once, then passes its id to another task in another queue."""
    if not self.request.retries:
        raise self.retry(countdown=0, queue=queue, max_retries=1)
    self.replace(self.app.signature(then).set(countdown=countdown, queue=queue))


@task(bind=True)
def retry_with(self: Any, options: dict[str, Any]) -> None:
    """Is retried in an hour, with these options."""
    raise self.retry(countdown=3600, **options)


@task(bind=True, acks_late=True)
def retry_late_with(self: Any, options: dict[str, Any]) -> None:
    raise self.retry(countdown=3600, **options)


@task(bind=True)
def replace_by(self: Any, then: str, headers: dict[str, Any]) -> None:
    """Is replaced by another task, with these headers."""
    self.replace(self.app.signature(then).set(headers=headers))


@task()
def leave() -> None:
    """Ends as a process would, in pools whose tasks are not processes."""
    raise SystemExit(1)


@task(bind=True, acks_late=True)
def retry_unsent(self: Any, error: str) -> None:
    """Its first retry fails to be sent, as in an outage."""
    _retry_unsent(self, error)


@task(bind=True)
def retry_unsent_early(self: Any) -> None:
    """The same, but the message is acked before."""
    _retry_unsent(self)


def _retry_unsent(self: Any, error: str = "gone") -> None:
    write_down(self)
    if not (self.request.delivery_info or {}).get("redelivered"):
        self.signature_from_request = lambda *args, **options: _Unsendable(error)
        self.retry(countdown=0)


class _Unsendable:
    def __init__(self, error: str) -> None:
        self.error = {"gone": OperationalError, "too few replicas": NotReplicated}[error]

    def apply_async(self) -> None:
        raise self.error("it cannot be sent")


@task(bind=True)
def send_from_task(self: Any, task_id: str, countdown: float) -> None:
    self.app.send_task("record", task_id=task_id, countdown=countdown)


app = make_app(Settings.from_environment())
