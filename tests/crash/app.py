"""The Celery app of the crash tests: tasks that write down when they start and when they end.

KOMBU_DELAYED_TEST_APP       JSON: fields of `tests.kit.tasks_app.Settings`; `ledger` is a directory
KOMBU_DELAYED_TEST_WORKER    the name under which this process writes
KOMBU_DELAYED_TEST_POLICYLESS    if set, the app does not know the limits
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from celery import Celery, signals
from celery.worker.request import Request
from kombu import Producer

from tests.crash.journal import WORKER, Journal, running, write, write_end, write_start, written_to
from tests.kit.tasks_app import Settings

POLICYLESS = "KOMBU_DELAYED_TEST_POLICYLESS"

#: The task that waits for an answer.
EXPECTATION = "celery_ext.expectation"
#: The errors with which it fails in a run without faults.
_ENDS = frozenset({"AnswerFailed", "AnswerTimeout"})

_publishing = threading.local()


def _write(request: Request, event: str, **facts: Any) -> None:
    write(event, request.id, request.request_dict.get("retries") or 0, **facts)


# Each event of a message in a worker is written down, for any class of requests.

_STOCK = {name: vars(Request)[name] for name in ("on_accepted", "acknowledge", "reject")}


def _on_accepted(self: Request, pid: int, time_accepted: float) -> None:
    _write(self, "accepted", child=pid)
    _STOCK["on_accepted"](self, pid, time_accepted)


def _acknowledge(self: Request) -> None:
    if not self.acknowledged:
        _write(self, "ack")
    _STOCK["acknowledge"](self)


def _reject(self: Request, requeue: bool = False) -> None:
    if not self.acknowledged:
        _write(self, "reject", requeue=requeue)
    _STOCK["reject"](self, requeue=requeue)


def _run(self: Any, seconds: float = 0, retries: int = 0, countdown: float = 0, **_: Any) -> None:
    """Ignores other arguments, which limits may read."""
    with running(self):
        time.sleep(seconds)
        if self.request.retries < retries:
            raise self.retry(countdown=countdown)


def _busy(self: Any, seconds: float) -> None:
    """Lets no other greenlet of its worker run."""
    with running(self):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass


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
            "max_retries": 180,  # each of the three URLs counts
            "interval_start": 0.05,
            "interval_step": 0.05,
            "interval_max": 0.2,
        },
        **settings.config,
    )
    options = {"bind": True, "shared": False, "max_retries": None}
    app.task(name="run_early", **options)(_run)
    app.task(name="run_late", acks_late=True, **options)(_run)
    app.task(name="keep_busy", acks_late=True, **options)(_busy)
    if settings.broker_url and settings.broker_url.startswith("delayed+"):
        _extend(app)
    return app


def _extend(app: Celery) -> None:
    """Adds limits and tasks that expect answers, which other brokers do not have."""
    from celery_ext import install
    from tests.crash import asking, limits

    options = app.conf.broker_transport_options
    # Longer than any step of the clock.
    app.conf.delayed_expectations = {"early_seconds": 86_400}
    if POLICYLESS not in os.environ:
        app.conf.broker_transport_options = {**options, "delayed_policies": limits.policies()}
    asking.add_tasks(app)
    app.conf.delayed_outcomes = {"limit": 100_000}
    install(app)


def _execution(headers: dict[str, Any]) -> tuple[str, int]:
    return headers.get("id") or "", headers.get("retries") or 0


def _before_publish(headers: dict[str, Any] | None = None, **_: Any) -> None:
    headers = headers or {}
    _publishing.what = _execution(headers)
    write("publish", *_publishing.what, eta=headers.get("eta"))


def _after_publish(headers: dict[str, Any] | None = None, **_: Any) -> None:
    headers = headers or {}
    write("published", *_execution(headers), eta=headers.get("eta"))


def _received(request: Any, **_: Any) -> None:
    redelivered = bool((request.delivery_info or {}).get("redelivered"))
    tag = str(request.message.delivery_tag)
    _write(request, "received", redelivered=redelivered, tag=tag)


def _ready(**_: Any) -> None:
    write("ready", "", 0)


def _begins(task: Any, **_: Any) -> None:
    if task.name == EXPECTATION:
        answer = (task.request.headers or {}).get("delayed_answer")
        write_start(task, answered=answer is not None)


def _ended(task: Any, state: str, retval: Any, **_: Any) -> None:
    if task.name == EXPECTATION:
        done = state in ("SUCCESS", "IGNORED") or type(retval).__name__ in _ENDS
        write_end(task, "done" if done else state.lower())


_HOOKS = (
    (signals.before_task_publish, _before_publish),
    (signals.after_task_publish, _after_publish),
    (signals.task_received, _received),
    (signals.worker_ready, _ready),
    (signals.task_prerun, _begins),
    (signals.task_postrun, _ended),
)


_publish = Producer._publish


def _watched_publish(self: Producer, *args: Any, **options: Any) -> Any:
    # It failed here, but the server may have carried it out.
    try:
        return _publish(self, *args, **options)
    except Exception as error:
        id, retries = getattr(_publishing, "what", ("", 0))
        write("publish failed", id, retries, error=repr(error))
        raise


@contextmanager
def writing(directory: Path, name: str) -> Iterator[None]:
    """Write down all that this process publishes, receives and runs while the context is open."""
    watched = {"on_accepted": _on_accepted, "acknowledge": _acknowledge, "reject": _reject}
    with ExitStack() as stack:
        stack.enter_context(patch.object(Producer, "_publish", _watched_publish))
        stack.enter_context(patch.multiple(Request, **watched))
        for hook, receiver in _HOOKS:
            hook.connect(receiver)
            stack.callback(hook.disconnect, receiver)
        stack.enter_context(written_to(Journal(directory, name)))
        yield


def _show_greenlets(signum: int, frame: Any) -> None:
    """Prints the stack of each waiting greenlet; the stacks of threads do not show these."""
    kind = getattr(sys.modules.get("greenlet"), "greenlet", None)
    for each in gc.get_objects() if kind else ():
        if isinstance(each, kind) and each.gr_frame:
            print(each, *traceback.format_stack(each.gr_frame), sep="\n", file=sys.__stderr__)


if WORKER in os.environ:
    # A process that does not end prints its stacks on SIGUSR2.
    signal.signal(signal.SIGUSR2, _show_greenlets)
    faulthandler.register(signal.SIGUSR2, chain=True)
    _settings = Settings.from_environment()
    _writing = writing(Path(_settings.ledger), os.environ[WORKER])
    _writing.__enter__()  # until the process ends
    app = make_app(_settings)
