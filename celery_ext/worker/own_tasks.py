"""Our own tasks that workers run, each only if a setting of the app enables it."""

from __future__ import annotations

from typing import Any

from celery import bootsteps
from celery.signals import task_unknown
from celery.utils.log import get_logger

from ..control.answers import options as expectations
from ..control.answers import waiting_task
from ..http import options as http
from ..http.callbacks import jobs

logger = get_logger(__name__)

#: How to enable each.
_HOW = {jobs.JOB_TASK: http.HOW, waiting_task.TASK: expectations.HOW}


class OwnTasks(bootsteps.Step):
    """Registers HTTP jobs and expectations, and logs what to set if one is off but arrives."""

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        if http.HttpOptions.of(parent.app).callbacks:
            worker = parent.controller
            jobs.register(parent.app, worker.max_concurrency or worker.concurrency)
        if expectations.ExpectationOptions.are_set(parent.app):
            waiting_task.register(parent.app)
        task_unknown.connect(_on_unknown, dispatch_uid=__name__)


def _on_unknown(sender: Any, name: str, id: str, **_: Any) -> None:
    if name in _HOW:
        logger.error(
            "Task %s[%s] becomes a dead letter, because the app of this worker did not ask for "
            "such tasks: %s, start it again, and replay the dead letter",
            *(name, id, _HOW[name]),
        )
