"""What happens to the message of a task that has failed."""

from __future__ import annotations

from typing import Any

from celery.exceptions import Reject
from kombu.exceptions import OperationalError

from kombu_delayed.errors import NotReplicated, ServerFull


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


def is_out_of_reach(reason: Any) -> bool:
    """Returns whether a retry was not sent because the broker is unreachable."""
    # A retry that the master already has is stored once, even if it is sent again.
    out_of_reach = isinstance(reason, (OperationalError, NotReplicated))
    return out_of_reach and not isinstance(reason, ServerFull)
