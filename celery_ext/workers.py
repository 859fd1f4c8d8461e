"""Workers that `celery worker` starts give back what they have not begun, with no import line."""

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


def _on_init(sender: Any, **_: Any) -> None:
    from kombu_delayed.transport import Transport

    if issubclass(sender.app.connection_for_read().get_transport_cls(), Transport):
        give_back_early(sender.app)
