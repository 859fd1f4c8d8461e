"""Workers give back what they have not begun, with no import line.

Celery's command line imports this module, and so does our transport in other programs with Celery.
"""

from __future__ import annotations

from typing import Any

from celery import Celery
from celery.signals import worker_init

_UID = f"{__name__}.worker_init"


def watch_workers() -> None:
    """Extend workers of this process whose broker is ours; twice is safe."""
    worker_init.connect(_on_init, weak=False, dispatch_uid=_UID)


def give_back_early(app: Celery) -> None:
    """Let workers of an app give back what they have not begun when they end; twice is safe."""
    from .bootsteps import GiveBack, OwnRequests

    app.steps["consumer"].update({GiveBack, OwnRequests})


def never_wait_for_events(app: Celery) -> None:
    """Let the event loops of an app's workers go on while the broker is away; twice is safe."""
    from .bootsteps import Events

    app.steps["consumer"].add(Events)


def show_metrics(app: Celery) -> None:
    """Let workers of an app show metrics, where a setting asks for it; twice is safe."""
    from ..metrics.options import MetricsOptions

    if MetricsOptions.of(app) is not None:
        from .metrics_steps import Exporter, MeasuredRequests

        app.steps["worker"].add(Exporter)
        app.steps["consumer"].add(MeasuredRequests)


def run_http_jobs(app: Celery) -> None:
    """Let workers of an app run HTTP jobs; twice is safe."""
    from ..http.callbacks.jobs import register

    register(app)


def run_expectations(app: Celery) -> None:
    """Let workers of an app do what follows from answers; twice is safe."""
    from ..control.answers.expecting import register

    register(app)


def let_late_results_expire(app: Celery) -> None:
    """Let no result for `rpc://` stay for ever that nobody fetches; twice is safe."""
    if str(app.conf.result_backend).startswith("rpc"):
        from .late_results import install

        install()


def _on_init(sender: Any, **_: Any) -> None:
    from kombu_delayed.transport.transport import Transport

    if issubclass(sender.app.connection_for_read().get_transport_cls(), Transport):
        give_back_early(sender.app)
        never_wait_for_events(sender.app)
        run_http_jobs(sender.app)
        run_expectations(sender.app)
        show_metrics(sender.app)
        let_late_results_expire(sender.app)


watch_workers()
