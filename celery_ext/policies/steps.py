"""Makes workers check and follow policies."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from celery import Celery, _state, bootsteps
from celery.signals import worker_init
from celery.utils.log import get_logger

from .apps import declared_by, policies_of
from .declared import DeclaredPolicies, strategy_in
from .of_message import policies_in, strategies_in
from .policy import Policy, checked
from .retry.apply_strategies import follow
from .retry.strategies import RetryStrategy
from .rules import Rules
from .times import timeout
from .times.timeout import Timeout

logger = get_logger(__name__)

#: Pools that do not enforce hard time limits, by their modules.
CANNOT_END = {
    "celery.concurrency.eventlet": "eventlet",
    "celery.concurrency.solo": "solo",
    "celery.concurrency.thread": "threads",
}

#: Celery's task that looks, by retries, whether all results of a chord are there.
CHORD_UNLOCK = "celery.chord_unlock"

_UID = f"{__name__}.worker_init"


class Policies(bootsteps.Step):
    """Checks the policies of all tasks, and makes tasks follow their retry strategies.

    It runs before a pool of processes starts, so that they follow them, too. Raises PolicyError.
    """

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        apply(parent.app)
        pool = str(getattr(parent.pool_cls, "__module__", ""))
        if pool not in CANNOT_END:
            timeout.worker_limits["time_limit"] = parent.time_limit
            timeout.worker_limits["soft_time_limit"] = parent.soft_time_limit
        elif _has_timeout(parent.app):
            logger.warning(
                "Timeout policies only apply to tasks that have not started: the pool %s cannot "
                "end a running task. A prefork pool can",
                CANNOT_END[pool],
            )


def _has_timeout(app: Celery) -> bool:
    of_queues = (declared_by(app) or {}).values()
    found = chain(*of_queues, *map(policies_of, app.tasks.values()))
    return any(isinstance(each, Timeout) for each in found)


def apply(app: Celery) -> None:
    """Check the policies of an app's tasks and make them follow retry strategies. Idempotent."""
    declared = declared_by(app) or {}
    policies = DeclaredPolicies(declared)
    Rules(declared).check()

    def strategy_of(
        queue: str, of_task: tuple[Policy, ...], headers: Mapping[str, Any]
    ) -> RetryStrategy | None:
        brought, named = policies_in(headers), strategies_in(headers)
        if named is not None:
            return strategy_in((*brought, *named))
        return policies.strategy(queue, of_task, brought)

    for name, task in app.tasks.items():
        checked(f"task {name}", getattr(task, "policies", None) or ())
        if name != CHORD_UNLOCK:
            follow(task, strategy_of)  # in any case: a message may have its own strategy


def watch_workers() -> None:
    """Make workers of this process follow policies. Idempotent."""
    worker_init.connect(_on_init, weak=False, dispatch_uid=_UID)
    # In older Celery, workers that tests start do not send that signal.
    _state.connect_on_app_finalize(_extend)
    for app in tuple(_state._get_active_apps()):
        _extend(app)


def _on_init(sender: Any, **_: Any) -> None:
    _extend(sender.app)


def _extend(app: Celery) -> None:
    app.steps["worker"].add(Policies)
