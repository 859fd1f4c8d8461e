"""Acks or rejects messages of tasks that Celery or a pool did not handle to the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from billiard.einfo import ExceptionInfo
from celery.exceptions import Reject
from celery.signals import task_revoked
from celery.utils.log import get_logger

logger = get_logger(__name__)


def settle(request: Any, error: BaseException, returns: bool) -> None:
    """Ack or reject the message of a task if Celery has raised before that.

    Celery does so if it cannot store the result of a rejected task, and for each MemoryError, which
    stops some workers. Otherwise a worker would keep the message, and its place in the prefetch
    limit, until it ends, and the message would stop the next one, too. `returns` says whether
    Celery puts the message back.
    """
    task = request.task
    if not task.acks_late or request.acknowledged:
        return
    if isinstance(error, Reject):
        request.reject(requeue=error.requeue)
    elif returns:
        request.reject(requeue=True)
    elif getattr(task, "acks_on_failure", task.acks_on_failure_or_timeout):  # before Celery 5.7
        request.acknowledge()
    else:
        request.reject()


def settle_revoked(
    request: Any, error: Exception, terminated: bool, signum: Any, expired: bool
) -> None:
    """Ack the message of a revoked or expired task if Celery cannot store its result.

    The error would end the worker, and the message would return and end the next one.
    """
    logger.error("The result of task %s[%s] is not stored: %r", request.name, request.id, error)
    request.acknowledge()
    request._already_revoked = True
    facts = {"terminated": terminated, "signum": signum, "expired": expired}
    task_revoked.send(request.task, request=request._context, **facts)


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
