"""Acks or rejects messages of tasks that Celery or a pool did not handle to the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from billiard.einfo import ExceptionInfo
from billiard.exceptions import TimeLimitExceeded
from celery.exceptions import Reject
from celery.signals import task_revoked
from celery.utils.log import get_logger

logger = get_logger(__name__)


def settle(request: Any, error: BaseException, returns: bool = False) -> None:
    """Ack or reject the message of a task if Celery has raised before that.

    Celery does so if it cannot store the result of a rejected task, or of one that exceeds its time
    limit in a greenlet, and for each MemoryError, which stops some workers. Otherwise a worker
    would keep the message, and its place in the prefetch limit, until it ends, and the message
    would stop the next one, too. `returns` says whether Celery puts the message back.
    """
    task = request.task
    if not task.acks_late or request.acknowledged:
        return
    is_timeout = isinstance(error, TimeLimitExceeded)
    both = task.acks_on_failure_or_timeout  # the only setting before Celery 5.7
    acks = getattr(task, "acks_on_timeout" if is_timeout else "acks_on_failure", both)
    if isinstance(error, Reject):
        request.reject(requeue=error.requeue)
    elif returns or (is_timeout and not acks):
        request.reject(requeue=True)
    elif acks:
        request.acknowledge()
    else:
        request.reject()


def settle_revoked(
    request: Any, error: Exception, terminated: bool, signum: Any, expired: bool
) -> None:
    """Ack the message of a revoked or expired task if Celery cannot store its result.

    The error would end the worker, and the message would return and end the next one.
    """
    not_stored(request, error)
    request.acknowledge()
    request._already_revoked = True
    facts = {"terminated": terminated, "signum": signum, "expired": expired}
    task_revoked.send(request.task, request=request._context, **facts)


def not_stored(request: Any, error: Exception) -> None:
    """Log that Celery cannot store the result of a task."""
    logger.error("The result of task %s[%s] is not stored: %r", request.name, request.id, error)


def report_errors(pool: Any) -> None:
    """Let a pool of threads or greenlets, or of one thread, report every error as a failed task.

    Celery raises one if it can store neither the result of a task nor its failure. Such a pool
    tells nobody, so the message would stay with the worker, and the solo pool would end the worker.
    A process reports it itself.
    """
    apply = pool.on_apply

    def on_apply(target: Callable[..., Any], *args: Any, **options: Any) -> Any:
        def result_or_error(*given: Any, **named: Any) -> Any:
            try:
                return target(*given, **named)
            except Exception as error:
                if not isinstance(error, Reject):
                    logger.exception("Task handler raised error: %r", error)
                return True, ExceptionInfo(), None

        return apply(result_or_error, *args, **options)

    vars(pool)["on_apply"] = on_apply
