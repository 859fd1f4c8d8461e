"""A Celery extension: see, cancel and move what is delayed, with no worker alive."""

from __future__ import annotations

from .delayed import Delayed, Outcome
from .errors import BrokerError
from .install import install
from .query import Query
from .task_info import TaskInfo

__all__ = ["BrokerError", "Delayed", "Outcome", "Query", "TaskInfo", "install"]
