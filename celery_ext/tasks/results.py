"""The result of a task that was cancelled, dropped or buried before it ran."""

from __future__ import annotations

from typing import Any

from celery import Celery
from celery.app.task import Context, Task
from celery.backends.base import DisabledBackend
from celery.states import READY_STATES
from celery.utils.log import get_logger

from kombu_delayed.consumer.policy.decisions import Bury, Decision, Drop
from kombu_delayed.errors import DelayedError

from .body import read_body
from .task_info import TaskInfo

logger = get_logger(__name__)


class NotRun(DelayedError):
    """A policy made this task a dead letter: it did not run."""

    #: The backend stores it with the result, and clients of other versions import it from there.
    __module__ = "celery_ext.policies"


def keeps_results(app: Celery) -> bool:
    """Returns whether the app or a task itself has a result backend, even a broken one."""
    try:
        if not isinstance(app.backend, DisabledBackend):
            return True
    except Exception:  # something that a backend needs is missing: `store_revoked` logs it
        return True
    return any(
        task._backend is not None or type(task).backend is not Task.backend
        for task in app.tasks.values()
    )


def store_revoked(app: Celery, info: TaskInfo, reason: str = "cancelled") -> None:
    """Notify the result backend, and so the chord of a task, and tools such as Flower."""
    _store(app, info, reason, "mark_as_revoked", reason)
    if info.id and app.conf.task_send_sent_event:
        _send_revoked_event(app, info.id)


def _send_revoked_event(app: Celery, id: str) -> None:
    """Send the end event for a `task-sent`, because no worker has seen the task."""
    fields = {"uuid": id, "terminated": False, "signum": None, "expired": False}
    try:
        with app.producer_or_acquire() as producer:
            app.events.Dispatcher(enabled=False).publish("task-revoked", fields, producer)
    except Exception as error:  # the task is gone from the broker in any case
        logger.warning("No event says that task %s is revoked: %s", id, error)


def store_failure(app: Celery, info: TaskInfo, error: Exception) -> None:
    """Like `store_revoked`, for a task that can never run."""
    _store(app, info, str(error), "mark_as_failure", error)


def store_outcome(app: Celery, info: TaskInfo, decision: Decision) -> None:
    """Store REVOKED for a dropped task, FAILURE with NotRun for a buried one, with the reason."""
    if isinstance(decision, Drop) and decision.revoked:
        store_revoked(app, info, decision.reason)
    elif isinstance(decision, Bury):
        store_failure(app, info, NotRun(decision.reason))


def _store(app: Celery, info: TaskInfo, why: str, mark: str, given: Any) -> None:
    if not info.id:
        return
    try:
        backend = _backend(app, info.task)
        if isinstance(backend, DisabledBackend):
            return
        is_kept = not info.headers.get("ignore_result") and _is_open(backend, info.id)
        context = context_of(app, info)
        getattr(backend, mark)(info.id, given, request=context, store_result=is_kept)
    except Exception as error:  # the task is gone from the broker, even without a stored result
        logger.warning("Task %s is %s, but its result is not stored: %s", info.id, why, error)


def _backend(app: Celery, task: str) -> Any:
    """The backend of a task, which may be another one than the app's."""
    return getattr(app.tasks.get(task), "backend", None) or app.backend


def _is_open(backend: Any, id: str) -> bool:
    """Returns whether the task has no result yet. Celery's workers overwrite none either."""
    try:
        return backend.get_state(id) not in READY_STATES
    except NotImplementedError:
        return True


def context_of(app: Celery, info: TaskInfo) -> Context:
    """The request context that the task's worker would have had."""
    sent = {name: info.properties.get(name) for name in ("reply_to", "correlation_id")}
    args, kwargs, embedded = read_body(app, info) or ((), {}, {})
    parts = {**info.headers, **sent, **embedded, "args": args, "kwargs": kwargs}
    delivery = {**info.properties["delivery_info"], "priority": info.properties.get("priority")}
    return Context(parts, task=info.task, delivery_info=delivery, called_directly=False)
