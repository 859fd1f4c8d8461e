"""A Celery extension: see, cancel and move what is delayed, with no worker alive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .app import signals
    from .control.answers.answering import fail, respond
    from .control.answers.asking import Expectation, expect
    from .control.bulk.schedule import BulkReport
    from .control.delayed import Delayed, Outcome
    from .control.unique import AlreadyDelayed, UniqueTask, unique_headers
    from .errors import BackupError, BrokerError, BulkError, QueryError
    from .tasks.query import Query
    from .tasks.task_info import TaskInfo
    from .worker import tracing
    from .worker.install import install

_HOMES = {
    "AlreadyDelayed": "control.unique",
    "BackupError": "errors",
    "BrokerError": "errors",
    "BulkError": "errors",
    "BulkReport": "control.bulk.schedule",
    "Delayed": "control.delayed",
    "Expectation": "control.answers.asking",
    "Outcome": "control.delayed",
    "Query": "tasks.query",
    "QueryError": "errors",
    "TaskInfo": "tasks.task_info",
    "UniqueTask": "control.unique",
    "expect": "control.answers.asking",
    "fail": "control.answers.answering",
    "install": "worker.install",
    "respond": "control.answers.answering",
    "unique_headers": "control.unique",
}

#: Modules that are known by a short name.
_MODULES = {"signals": "app.signals", "tracing": "worker.tracing"}

__all__ = [
    "AlreadyDelayed",
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
    "UniqueTask",
    "expect",
    "fail",
    "install",
    "respond",
    "signals",
    "tracing",
    "unique_headers",
]


def __getattr__(name: str) -> Any:
    # The command line and every pytest run import this package: nothing heavy before it is used.
    if name not in _HOMES and name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    if name in _MODULES:
        return import_module(f".{_MODULES[name]}", __name__)
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
