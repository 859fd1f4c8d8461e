"""What the result backend is told of a task that a policy has ended."""

from __future__ import annotations

from celery import Celery
from celery.utils.log import get_logger

from kombu_delayed.consumer.policy.decisions import Bury, Decision, Drop
from kombu_delayed.errors import DelayedError

from .results import store_failure, store_revoked
from .task_info import TaskInfo

logger = get_logger(__name__)


class NotRun(DelayedError):
    """A policy has buried this task: it did not run."""


def store_outcome(app: Celery, info: TaskInfo, decision: Decision) -> None:
    """REVOKED for what was dropped, FAILURE with NotRun for what was buried, with the reason."""
    if isinstance(decision, Drop) and decision.revoked:
        store_revoked(app, info, decision.reason)
    elif isinstance(decision, Bury):
        store_failure(app, info, NotRun(decision.reason))
