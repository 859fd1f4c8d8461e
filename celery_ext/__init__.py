"""A Celery extension: see, cancel and move what is delayed, with no worker alive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .control.answers import Expectation, expect, fail, respond
    from .control.bulk.schedule import BulkReport
    from .control.delayed import Delayed, Outcome
    from .errors import BackupError, BrokerError, BulkError, QueryError
    from .tasks.query import Query
    from .tasks.task_info import TaskInfo
    from .worker.install import install

_HOMES = {
    "BackupError": "errors",
    "BrokerError": "errors",
    "BulkError": "errors",
    "BulkReport": "control.bulk.schedule",
    "Delayed": "control.delayed",
    "Expectation": "control.answers",
    "Outcome": "control.delayed",
    "Query": "tasks.query",
    "QueryError": "errors",
    "TaskInfo": "tasks.task_info",
    "expect": "control.answers",
    "fail": "control.answers",
    "install": "worker.install",
    "respond": "control.answers",
}

__all__ = [
    "BackupError",
    "BrokerError",
    "BulkError",
    "BulkReport",
    "Delayed",
    "Expectation",
    "Outcome",
    "Query",
    "QueryError",
    "TaskInfo",
    "expect",
    "fail",
    "install",
    "respond",
]


def __getattr__(name: str) -> Any:
    # The command line and every pytest run import this package: nothing heavy before it is used.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
