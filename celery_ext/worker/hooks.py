"""Makes workers return messages that they have not started. Imported for its side effects.

Celery's command line imports this module, and so does the transport in other Celery programs.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from celery import Celery
from celery.signals import worker_init

from kombu_delayed.errors import OptionError, UrlError

_UID = f"{__name__}.worker_init"


def watch_workers() -> None:
    """Extend workers of this process that use our broker. Safe to call twice."""
    worker_init.connect(_on_init, weak=False, dispatch_uid=_UID)


def extend_workers(app: Celery) -> None:
    """Let an app's workers return messages early, and run our tasks that its settings enable.

    Safe to call twice.
    """
    from .bootsteps import STEPS
    from .own_tasks import OwnTasks

    app.steps["consumer"] |= {*STEPS, OwnTasks}
    app.steps["worker"].add("celery_ext.policies.steps:Policies")  # messages may carry some


def show_metrics(app: Celery) -> None:
    """Let an app's workers expose metrics if a setting enables it. Safe to call twice."""
    from ..metrics.options import MetricsOptions

    if MetricsOptions.of(app) is not None:
        from .metrics_steps import Exporter, MeasuredRequests

        app.steps["worker"].add(Exporter)
        app.steps["consumer"].add(MeasuredRequests)


def let_late_results_expire(app: Celery) -> None:
    """Let results for `rpc://` expire that nobody fetches. Safe to call twice."""
    if not str(app.conf.result_backend).startswith("rpc"):
        return
    from celery.backends.rpc import RPCBackend

    from kombu_delayed.transport.channel.publishing import lifetimes

    find = RPCBackend.destination_for
    if hasattr(find, "__wrapped__"):
        return

    @wraps(find)
    def destination_for(backend: Any, task_id: str, request: Any) -> tuple[str, str]:
        queue, correlation_id = find(backend, task_id, request)
        if queue and backend.expires:
            lifetimes.note(queue, int(backend.expires * 1000))
        return queue, correlation_id

    RPCBackend.destination_for = destination_for


def _on_init(sender: Any, **_: Any) -> None:
    from kombu_delayed.transport.transport import Transport

    if issubclass(sender.app.connection_for_read().get_transport_cls(), Transport):
        extend_workers(sender.app)
        _check_settings(sender.app)
        show_metrics(sender.app)
        let_late_results_expire(sender.app)


def _check_settings(app: Celery) -> None:
    """Raises SystemExit for an invalid setting or broker URL.

    Celery would continue after any other error, or log a traceback.
    """
    from kombu_delayed.connection.urls import address

    from ..app.outcome_options import OutcomeOptions
    from ..app.settings import misplaced
    from ..control.answers.options import ExpectationOptions
    from ..http.options import HttpOptions
    from ..metrics.options import MetricsOptions

    if text := misplaced(app.conf):
        raise SystemExit(f"Error: {text}")
    try:
        address(app.connection_for_read())
        for options in (OutcomeOptions, MetricsOptions, HttpOptions, ExpectationOptions):
            options.of(app)
    except (OptionError, UrlError) as error:
        raise SystemExit(f"Error: {error}") from error


watch_workers()
