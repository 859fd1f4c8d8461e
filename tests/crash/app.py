"""The Celery app of the crash tests: tasks that write down when they start and when they end.

KOMBU_DELAYED_TEST_APP       JSON: fields of `tests.kit.tasks_app.Settings`; `ledger` is a directory
KOMBU_DELAYED_TEST_WORKER    the name under which this process writes
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from celery import Celery, signals
from celery.exceptions import Retry
from celery.worker.request import Request
from kombu import Producer

from tests.crash.journal import Journal
from tests.kit.tasks_app import Settings

WORKER = "KOMBU_DELAYED_TEST_WORKER"
SENDER = "sender"

journal: Journal | None = None
_publishing = threading.local()


def write(event: str, id: str, retries: int, **facts: Any) -> None:
    if journal is not None:
        journal.write(event, id=id, retries=retries, **facts)


def _write(request: Request, event: str, **facts: Any) -> None:
    write(event, request.id, request.request_dict.get("retries") or 0, **facts)


@contextmanager
def _watched_requests() -> Iterator[None]:
    """What a worker does with a message is written down, whatever class its requests are of."""
    stock = {name: vars(Request)[name] for name in ("on_accepted", "acknowledge", "reject")}

    def on_accepted(self: Request, pid: int, time_accepted: float) -> None:
        _write(self, "accepted", child=pid)
        stock["on_accepted"](self, pid, time_accepted)

    def acknowledge(self: Request) -> None:
        if not self.acknowledged:
            _write(self, "ack")
        stock["acknowledge"](self)

    def reject(self: Request, requeue: bool = False) -> None:
        if not self.acknowledged:
            _write(self, "reject", requeue=requeue)
        stock["reject"](self, requeue=requeue)

    for method in (on_accepted, acknowledge, reject):
        setattr(Request, method.__name__, method)
    try:
        yield
    finally:
        for name, method in stock.items():
            setattr(Request, name, method)


def _execute(task: Any, seconds: float, retries: int, countdown: float) -> None:
    request = task.request
    known = {"id": request.id, "retries": request.retries}
    write(
        "start",
        **known,
        late=task.acks_late,
        eta=request.eta,
        redelivered=bool((request.delivery_info or {}).get("redelivered")),
    )
    outcome = "done"
    try:
        time.sleep(seconds)
        if request.retries < retries:
            raise task.retry(countdown=countdown)
    except Retry:
        outcome = "retried"
        raise
    except BaseException as error:
        outcome = repr(error)
        raise
    finally:
        write("end", **known, outcome=outcome)


def _early(self: Any, seconds: float = 0, retries: int = 0, countdown: float = 0) -> None:
    """Is acked when it starts."""
    _execute(self, seconds, retries, countdown)


def _late(self: Any, seconds: float = 0, retries: int = 0, countdown: float = 0) -> None:
    """Is acked when it is done."""
    _execute(self, seconds, retries, countdown)


def make_app(settings: Settings) -> Celery:
    app = Celery("crash", set_as_current=False)
    app.conf.update(
        broker_url=settings.broker_url,
        broker_transport_options=settings.transport_options,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_connection_retry_delay=0.1,
        task_ignore_result=True,
        task_reject_on_worker_lost=True,
        task_publish_retry_policy={
            "max_retries": 180,  # of three URLs each counts
            "interval_start": 0.05,
            "interval_step": 0.05,
            "interval_max": 0.2,
        },
        **settings.config,
    )
    options = {"bind": True, "shared": False, "max_retries": None}
    app.task(name="run_early", **options)(_early)
    app.task(name="run_late", acks_late=True, **options)(_late)
    return app


def _before_publish(headers: dict[str, Any] | None = None, **_: Any) -> None:
    headers = headers or {}
    _publishing.what = headers.get("id"), headers.get("retries") or 0
    write("publish", *_publishing.what, eta=headers.get("eta"))


def _after_publish(headers: dict[str, Any] | None = None, **_: Any) -> None:
    headers = headers or {}
    write("published", headers.get("id"), headers.get("retries") or 0, eta=headers.get("eta"))


def _received(request: Any, **_: Any) -> None:
    _write(
        request,
        "received",
        redelivered=bool((request.delivery_info or {}).get("redelivered")),
        tag=str(request.message.delivery_tag),
    )


def _ready(**_: Any) -> None:
    write("ready", "", 0)


_HOOKS = (
    (signals.before_task_publish, _before_publish),
    (signals.after_task_publish, _after_publish),
    (signals.task_received, _received),
    (signals.worker_ready, _ready),
)


@contextmanager
def writing(directory: Path, name: str) -> Iterator[None]:
    """What this process publishes, receives and runs is written down until this ends."""
    global journal
    publish = Producer._publish

    def watched(self: Producer, *args: Any, **options: Any) -> Any:
        # The server may have done what failed here all the same.
        try:
            return publish(self, *args, **options)
        except Exception as error:
            id, retries = getattr(_publishing, "what", ("", 0))
            write("publish failed", id, retries, error=repr(error))
            raise

    journal = Journal(directory, name)
    Producer._publish = watched
    for hook, receiver in _HOOKS:
        hook.connect(receiver)
    try:
        with _watched_requests():
            yield
    finally:
        for hook, receiver in _HOOKS:
            hook.disconnect(receiver)
        Producer._publish = publish
        journal = None


if WORKER in os.environ:
    faulthandler.register(signal.SIGUSR2)  # what does not end shows where it hangs
    _settings = Settings.from_environment()
    _writing = writing(Path(_settings.ledger), os.environ[WORKER])
    _writing.__enter__()  # until the process ends
    app = make_app(_settings)
