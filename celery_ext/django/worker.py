"""The Celery task that runs Django's tasks."""

from __future__ import annotations

from traceback import format_exception
from typing import Any

from celery import shared_task
from django.tasks import TaskContext, TaskResult, TaskResultStatus
from django.tasks.exceptions import InvalidTask
from django.tasks.signals import task_finished, task_started
from django.utils import timezone
from django.utils.json import normalize_json

from ..policies.retry.apply_strategies import bury
from .record import Record, change, error_of, result_of, to_time

NAME = "celery_ext.django.run"


@shared_task(name=NAME, bind=True)
def run(self: Any, record: Record) -> Any:
    """Run a Django task that CeleryBackend has sent; its return value is the result."""
    request = self.request
    try:
        result = result_of(record, request.id)
    except InvalidTask as error:  # a worker of the version before, during a deploy
        bury(self, str(error), ())
        raise
    backend = result.task.get_backend()
    redelivered = (request.delivery_info or {}).get("redelivered")
    _start(result, request.hostname, backend.earlier(request.id) if redelivered else {})
    backend.keep(result)
    task_started.send_robust(type(backend), task_result=result)
    try:
        value = normalize_json(_call(result))
    except Exception as error:
        result.errors.append(error_of(error, "".join(format_exception(error))))
        change(result, status=TaskResultStatus.FAILED, finished_at=timezone.now())
        backend.keep(result)
        task_finished.send_robust(type(backend), task_result=result)
        raise
    now = timezone.now()
    change(result, status=TaskResultStatus.SUCCESSFUL, finished_at=now, _return_value=value)
    task_finished.send_robust(type(backend), task_result=result)
    return value


def _start(result: TaskResult, worker: str, earlier: Record) -> None:
    now = timezone.now()
    change(
        result,
        status=TaskResultStatus.RUNNING,
        started_at=to_time(earlier.get("started_at")) or now,
        last_attempted_at=now,
        worker_ids=[*earlier.get("worker_ids", ()), worker],
    )


def _call(result: TaskResult) -> Any:
    context = [TaskContext(task_result=result)] if result.task.takes_context else []
    return result.task.call(*context, *result.args, **result.kwargs)
