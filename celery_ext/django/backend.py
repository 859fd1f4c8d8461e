"""Sends Django's tasks to a Celery app, and finds their results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from functools import cached_property
from itertools import chain
from typing import Any

import celery.app.base
from celery import Celery, states
from celery.app.utils import find_app
from celery.backends.base import DisabledBackend
from celery.backends.rpc import RPCBackend
from celery.utils.log import get_logger
from celery.utils.saferepr import saferepr
from django.core import checks
from django.tasks import DEFAULT_TASK_QUEUE_NAME, Task, TaskResult, TaskResultStatus
from django.tasks.backends.base import BaseTaskBackend
from django.tasks.base import TASK_MAX_PRIORITY, TASK_MIN_PRIORITY
from django.tasks.exceptions import InvalidTask, InvalidTaskBackend, TaskResultDoesNotExist
from django.tasks.signals import task_enqueued
from django.utils import timezone
from kombu.utils.functional import maybe_list

from kombu_delayed.inspection.lookup import lookup_by_id
from kombu_delayed.transport.transport import Transport

from ..control.delayed import Delayed
from ..errors import BrokerError
from ..tasks.body import read_body
from ..tasks.task_info import TaskInfo
from .record import (
    Record,
    change,
    error_of,
    find_task,
    local_time,
    new_result,
    record_of,
    result_of,
)
from .worker import NAME

logger = get_logger(__name__)

#: The header by which `delayed.find` finds them, because all share one Celery task.
HEADER = "django_task"

#: Importing this module makes the Celery task known to a worker.
MODULE = "celery_ext.django"

#: Celery's priorities on Redis go from 0, the most urgent, to this.
LEAST_URGENT = 9


class CeleryBackend(BaseTaskBackend):
    """Sends Django tasks to a Celery app: `OPTIONS = {"app": "shop.celery:app"}`.

    The queue "default" is the app's default queue; other names are Celery's queues. Results are
    stored if the app stores results.
    """

    supports_defer = True
    supports_async_task = True
    supports_priority = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        """Raises InvalidTaskBackend for invalid options."""
        super().__init__(alias, params)
        if set(self.options) != {"app"} or not isinstance(self.options["app"], str | Celery):
            raise InvalidTaskBackend(
                f"TASKS[{alias!r}] needs OPTIONS such as {{'app': 'shop.celery:app'}} and no "
                f"others, not {self.options!r}"
            )

    @cached_property
    def app(self) -> Celery:
        """The Celery app. Raises InvalidTaskBackend if it cannot be loaded."""
        # Loaded on first use, because the module of the app may import the tasks.
        app = self.options["app"]
        try:
            found = find_app(app) if isinstance(app, str) else app
        except (ImportError, AttributeError) as error:
            raise InvalidTaskBackend(
                f"the app {app!r} of TASKS[{self.alias!r}] cannot be loaded: {error}"
            ) from error
        if not isinstance(found, Celery):
            raise InvalidTaskBackend(
                f"the app {app!r} of TASKS[{self.alias!r}] is not a Celery app but {found!r}"
            )
        return found

    @property
    def supports_get_result(self) -> bool:
        """Returns whether the app stores results that every process can read."""
        lacking = isinstance(self.app.backend, DisabledBackend | RPCBackend)
        return not lacking and not self.app.conf.task_ignore_result

    def enqueue(self, task: Task, args: Any, kwargs: Any) -> TaskResult:
        """Send a task that runs at once, or after its `run_after`.

        Raises InvalidTask if a worker could not import it, TypeError for arguments that are not
        JSON, and Kombu's OperationalError if the broker cannot be reached.
        """
        self.validate_task(task)
        _refuse_hidden(task)
        result = new_result(task, celery.app.base.uuid(), self.alias, args, kwargs)
        change(result, enqueued_at=timezone.now())
        record = record_of(result)
        self._keep(result.id, record)
        try:
            self._send(result, record)
        except BaseException:
            self._forget(result.id)
            raise
        task_enqueued.send(type(self), task_result=result)
        return result

    def _send(self, result: TaskResult, record: Record) -> None:
        task, amqp = result.task, self.app.amqp
        options: dict[str, Any] = {"headers": {HEADER: record["task"]}, "shadow": record["task"]}
        if task.run_after is not None:
            options["eta"] = _aware(task.run_after)
        if task.queue_name != DEFAULT_TASK_QUEUE_NAME:
            options["queue"] = task.queue_name
        self.app.tasks[NAME].apply_async(
            (record,),
            task_id=result.id,
            priority=celery_priority(task.priority),
            argsrepr=saferepr(tuple(result.args), amqp.argsrepr_maxsize),
            kwargsrepr=saferepr(result.kwargs, amqp.kwargsrepr_maxsize),
            **options,
        )

    # Results: Celery's own, and a record of what Celery does not keep.

    def keep(self, result: TaskResult) -> None:
        """In a worker: store the state of a task. The task runs even if this fails."""
        try:
            self._keep(result.id, record_of(result))
        except Exception as error:
            logger.warning("Task %s continues, but its state is not stored: %s", result.id, error)

    def _keep(self, id: str, record: Record) -> None:
        if self.supports_get_result:
            self.app.backend.store_result(_record_id(id), record, states.PENDING)

    def _forget(self, id: str) -> None:
        if self.supports_get_result:
            with suppress(Exception):  # it expires
                self.app.backend.forget(_record_id(id))

    def earlier(self, id: str) -> Record:
        """In a worker: the record of an earlier attempt whose worker was lost, if there is one."""
        try:
            return self.kept(id) or {}
        except Exception as error:
            logger.warning("Task %s continues without its earlier record: %s", id, error)
            return {}

    def kept(self, id: str) -> Record | None:
        """The last record of a task, if it exists and has not expired."""
        if not self.supports_get_result:
            return None
        found = self.app.backend.get_task_meta(_record_id(id), cache=False)["result"]
        return found if isinstance(found, dict) else None

    def get_result(self, result_id: str) -> TaskResult:
        """A task's result by its id, which is the id of the Celery task.

        Raises TaskResultDoesNotExist if there is no result or it has expired, InvalidTask if the
        task is no longer in the code, and NotImplementedError if the app keeps no results.
        """
        if not self.supports_get_result:
            raise NotImplementedError(
                f"the Celery app of TASKS[{self.alias!r}] keeps no results: set result_backend, to "
                "another one than rpc://, and leave task_ignore_result off"
            )
        record = self.kept(result_id) or self._delayed_record(result_id)
        if record is None:
            raise TaskResultDoesNotExist(result_id)
        result = result_of(record, result_id)
        _add_outcome(result, self.app.backend.get_task_meta(result_id))
        return result

    def _delayed_record(self, id: str) -> Record | None:
        """The record in the message: a task may be delayed for longer than results are kept."""
        with closing(Delayed(self.app)) as delayed, suppress(BrokerError):
            store = delayed.store
            for shard in chain.from_iterable(map(store.shards.all, self._queues_of(delayed))):
                for info in map(TaskInfo.of, lookup_by_id(store, shard, id)):
                    body = read_body(self.app, info) if info.task == NAME else None
                    if body is not None:
                        return dict(body[0][0])
        return None

    def _queues_of(self, delayed: Delayed) -> Iterator[str]:
        own = {*self.app.amqp.queues, *self.queues}
        yield from own
        if not self.queues:  # then Django allows any queue
            yield from (each for each in delayed.queues() if each not in own)

    def check(self, **kwargs: Any) -> Sequence[Any]:
        """Django's system checks."""
        try:
            app = self.app
        except InvalidTaskBackend as error:
            return [checks.Error(str(error), id="celery_ext.E001")]
        found = []
        with app.connection_for_write() as connection:
            if not isinstance(connection.transport, Transport):
                found.append(
                    checks.Warning(
                        "Tasks with run_after wait in the memory of workers, since the broker "
                        f"{connection.as_uri()} keeps no backlog.",
                        hint="Put delayed+ in front of the broker's URL.",
                        id="celery_ext.W001",
                    )
                )
        if MODULE not in (*maybe_list(app.conf.imports or ()), *maybe_list(app.conf.include or ())):
            found.append(
                checks.Warning(
                    "Workers may not know the Celery task that runs Django's tasks.",
                    hint=f'Set CELERY_IMPORTS = ["{MODULE}"].',
                    id="celery_ext.W002",
                )
            )
        return found


def celery_priority(priority: int) -> int:
    """Convert Django's 100, the most urgent, to -100 into Celery's 0 to 9 on Redis."""
    span = TASK_MAX_PRIORITY - TASK_MIN_PRIORITY
    return int(LEAST_URGENT * (TASK_MAX_PRIORITY - priority) / span + 0.5)


def _refuse_hidden(task: Task) -> None:
    path = task.module_path
    if task.func.__module__ == "__main__":
        raise InvalidTask(f"workers cannot import {path}: move the task into a module")
    if find_task(path).func is not task.func:
        raise InvalidTask(f"workers find another task as {path}: give each a name of its own")


def _aware(at: Any) -> Any:
    if timezone.is_aware(at):
        return at
    return timezone.make_aware(at, timezone.get_default_timezone())


def _record_id(id: str) -> str:
    return f"{id}:django"


def _add_outcome(result: TaskResult, meta: dict[str, Any]) -> None:
    """Add what Celery knows about a task."""
    state, value = meta["status"], meta["result"]
    if state == states.SUCCESS:
        change(result, status=TaskResultStatus.SUCCESSFUL, _return_value=value)
    elif state in states.PROPAGATE_STATES:
        change(result, status=TaskResultStatus.FAILED)
        if result.finished_at is None:  # it was cancelled, or its worker was lost
            result.errors.append(error_of(value, meta.get("traceback") or ""))
    else:
        started = state == states.STARTED or result.started_at is not None
        change(
            result,
            status=TaskResultStatus.RUNNING if started else TaskResultStatus.READY,
            finished_at=None,
        )
        return
    change(result, finished_at=result.finished_at or local_time(meta.get("date_done")))
