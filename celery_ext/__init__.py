"""A Celery extension: see, cancel and move what is delayed, with no worker alive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bulk import BulkReport
    from .correlation import Expectation, expect, fail, respond
    from .delayed import Delayed, Outcome
    from .errors import BackupError, BrokerError, BulkError, QueryError
    from .extend import install
    from .query import Query
    from .task_info import TaskInfo

_HOMES = {
    "BackupError": "errors",
    "BrokerError": "errors",
    "BulkError": "errors",
    "BulkReport": "bulk",
    "Delayed": "delayed",
    "Expectation": "correlation",
    "Outcome": "delayed",
    "Query": "query",
    "QueryError": "errors",
    "TaskInfo": "task_info",
    "expect": "correlation",
    "fail": "correlation",
    "install": "extend",
    "respond": "correlation",
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
