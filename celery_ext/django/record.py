"""Django's task results, as messages carry them and Celery's result backend keeps them."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from django.conf import settings
from django.tasks import Task, TaskResult, TaskResultStatus
from django.tasks.base import TaskError
from django.tasks.exceptions import InvalidTask
from django.utils.module_loading import import_string
from django.utils.timezone import make_naive

Record = dict[str, Any]

TIMES = ("enqueued_at", "started_at", "finished_at", "last_attempted_at")


def new_result(task: Task, id: str, backend: str, args: Any, kwargs: Any) -> TaskResult:
    """The result of a task that has not run. Raises TypeError for arguments that are not JSON."""
    times = dict.fromkeys(TIMES)
    return TaskResult(
        task=task,
        id=id,
        status=TaskResultStatus.READY,
        args=args,
        kwargs=kwargs,
        backend=backend,
        errors=[],
        worker_ids=[],
        **times,
    )


def change(result: TaskResult, **values: Any) -> None:
    """Set attributes that are frozen for everyone but a backend."""
    for name, value in values.items():
        object.__setattr__(result, name, value)


def record_of(result: TaskResult) -> Record:
    """All but the id, the status and the return value, in types that JSON can represent."""
    task = result.task
    return {
        "task": task.module_path,
        "priority": task.priority,
        "queue_name": task.queue_name,
        "run_after": _to_text(task.run_after),
        "backend": result.backend,
        "args": result.args,
        "kwargs": result.kwargs,
        "errors": [asdict(error) for error in result.errors],
        "worker_ids": result.worker_ids,
        **{name: _to_text(getattr(result, name)) for name in TIMES},
    }


def result_of(record: Record, id: str) -> TaskResult:
    """The unfinished result that `record_of` was given. Raises InvalidTask without its task."""
    task = find_task(record["task"]).using(
        priority=record["priority"],
        queue_name=record["queue_name"],
        run_after=to_time(record["run_after"]),
        backend=record["backend"],
    )
    result = new_result(task, id, record["backend"], record["args"], record["kwargs"])
    change(
        result,
        errors=[TaskError(**error) for error in record["errors"]],
        worker_ids=[*record["worker_ids"]],
        **{name: to_time(record[name]) for name in TIMES},
    )
    return result


def find_task(path: str) -> Task:
    """The task at a path such as `shop.background.report`. Raises InvalidTask without one."""
    try:
        found = import_string(path)
    except ImportError as error:
        raise InvalidTask(f"there is no Django task {path} in this process: {error}") from error
    if not isinstance(found, Task):
        raise InvalidTask(f"{path} is not a Django task but {found!r}: put @task on the function")
    return found


def error_of(error: BaseException, traceback: str) -> TaskError:
    kind = type(error)
    return TaskError(
        exception_class_path=f"{kind.__module__}.{kind.__qualname__}", traceback=traceback
    )


def local_time(value: datetime | str | None) -> datetime | None:
    """A time from Celery, in the form that Django's settings require."""
    at = to_time(value) if isinstance(value, str) else value
    if at is None:
        return None
    at = at if at.tzinfo else at.replace(tzinfo=timezone.utc)
    return at if settings.USE_TZ else make_naive(at)


def _to_text(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat()


def to_time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
