"""Makes workers return messages that they have not started. Imported for its side effects.

Celery's command line imports this module, and so does the transport in other Celery programs.
"""

from __future__ import annotations

from typing import Any

from celery import Celery
from celery.signals import worker_init

from kombu_delayed.errors import OptionError

_UID = f"{__name__}.worker_init"


def watch_workers() -> None:
    """Extend workers of this process whose broker is ours; twice is safe."""
    worker_init.connect(_on_init, weak=False, dispatch_uid=_UID)


def extend_workers(app: Celery) -> None:
    """Let workers of an app give back early, and run the tasks of ours that its settings ask for.

    Twice is safe.
    """
    from .bootsteps import Events, GiveBack, OwnRequests, Replacing
    from .own_tasks import OwnTasks
    from .remote.remote_control_loop import RemoteControlLoop

    app.steps["consumer"] |= {Events, GiveBack, OwnRequests, OwnTasks, RemoteControlLoop, Replacing}
    app.steps["worker"].add("celery_ext.policies.steps:Policies")  # messages may bring some along


def show_metrics(app: Celery) -> None:
    """Let workers of an app show metrics, where a setting asks for it; twice is safe."""
    from ..metrics.options import MetricsOptions

    if MetricsOptions.of(app) is not None:
        from .metrics_steps import Exporter, MeasuredRequests

        app.steps["worker"].add(Exporter)
        app.steps["consumer"].add(MeasuredRequests)


def let_late_results_expire(app: Celery) -> None:
    """Let no result for `rpc://` stay for ever that nobody fetches; twice is safe."""
    if str(app.conf.result_backend).startswith("rpc"):
        from .requests.late_results import install

        install()


def _on_init(sender: Any, **_: Any) -> None:
    from kombu_delayed.transport.transport import Transport

    if issubclass(sender.app.connection_for_read().get_transport_cls(), Transport):
        extend_workers(sender.app)
        _check_settings(sender.app)
        show_metrics(sender.app)
        let_late_results_expire(sender.app)


def _check_settings(app: Celery) -> None:
    """Raises SystemExit for a wrong setting: Celery would go on after another error here."""
    from ..app.outcome_options import OutcomeOptions
    from ..control.answers.options import ExpectationOptions
    from ..http.options import HttpOptions
    from ..metrics.options import MetricsOptions

    for options in (OutcomeOptions, MetricsOptions, HttpOptions, ExpectationOptions):
        try:
            options.of(app)
        except OptionError as error:
            raise SystemExit(f"Error: {error}") from error


watch_workers()
