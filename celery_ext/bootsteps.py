"""What workers of an extended app do besides."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

from celery import bootsteps
from celery.signals import task_received

from kombu_delayed.message import eta_to_ms

from .signals import task_late

REQUEST, STOCK_REQUEST = "celery_ext.request:Request", "celery.worker.request:Request"


class Inspection(bootsteps.Step):
    """Lets `celery inspect` show the backlog."""

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        # Only workers need Celery's worker modules.
        import_module("celery_ext.inspect")
        super().__init__(parent, **kwargs)


class WorkerName(str):
    """A consumer's name that no user has chosen."""

    __slots__ = ()


class Names(bootsteps.Step):
    """Lets the broker call the worker's consumers by its name."""

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        conf, option = parent.app.conf, "delayed_consumer_name"
        options = dict(conf.broker_transport_options)
        # An earlier worker in this process may have left its own.
        if isinstance(options.get(option), (WorkerName, type(None))):
            conf.broker_transport_options = {**options, option: WorkerName(parent.hostname)}


class Lateness(bootsteps.StartStopStep):
    """Lets `task_late` be sent."""

    def start(self, parent: Any) -> None:
        """Listen to what this worker receives."""
        self._late_seconds = parent.app.delayed.late_seconds
        task_received.connect(self._on_received, sender=parent, weak=False)

    def stop(self, parent: Any) -> None:
        """Listen no more."""
        task_received.disconnect(self._on_received, sender=parent)

    def _on_received(self, request: Any, **_: Any) -> None:
        eta = dict(request.request_dict).get("eta")
        if eta is None or not task_late.receivers:
            return
        late_seconds = time.time() - eta_to_ms(eta) / 1000
        if late_seconds > self._late_seconds:
            task_late.send(
                sender=request.name, task_id=request.id, eta=eta, late_seconds=late_seconds
            )


class OwnRequests(bootsteps.Step):
    """Gives tasks whose class is not the app's the request that knows whose they are."""

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        for task in parent.app.tasks.values():
            if task.Request == STOCK_REQUEST:
                task.Request = REQUEST
