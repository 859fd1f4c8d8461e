"""A Celery extension: find, cancel and move delayed tasks, with no worker alive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .app.lazy import names_of

if TYPE_CHECKING:
    from .app import signals
    from .control.answers.answering import fail, respond
    from .control.answers.asking import Expectation, expect
    from .control.bulk.schedule import BulkReport
    from .control.changes.change_many import Outcome
    from .control.delayed import Delayed
    from .control.unique import AlreadyDelayed, UniqueTask, unique_headers
    from .errors import BackupError, BrokerError, BulkError, QueryError, StillRunning
    from .tasks.history import TaskHistory
    from .tasks.query import Query
    from .tasks.task_info import TaskInfo
    from .worker import tracing
    from .worker.install import install

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
    "StillRunning",
    "TaskHistory",
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

# The command line and every pytest run import this package, so names are imported on first use.
__getattr__ = names_of(
    __name__,
    {
        "app.signals": ["signals"],
        "control.answers.answering": ["fail", "respond"],
        "control.answers.asking": ["Expectation", "expect"],
        "control.bulk.schedule": ["BulkReport"],
        "control.changes.change_many": ["Outcome"],
        "control.delayed": ["Delayed"],
        "control.unique": ["AlreadyDelayed", "UniqueTask", "unique_headers"],
        "errors": ["BackupError", "BrokerError", "BulkError", "QueryError", "StillRunning"],
        "tasks.history": ["TaskHistory"],
        "tasks.query": ["Query"],
        "tasks.task_info": ["TaskInfo"],
        "worker.install": ["install"],
        "worker.tracing": ["tracing"],
    },
    extra="tracing",
)
