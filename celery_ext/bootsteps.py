"""What workers of an extended app do besides."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from celery import bootsteps

REQUEST, STOCK_REQUEST = "celery_ext.request:Request", "celery.worker.request:Request"


class Inspection(bootsteps.Step):
    """Lets `celery inspect` show the backlog."""

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        # Only workers need Celery's worker modules.
        import_module("celery_ext.inspect")
        super().__init__(parent, **kwargs)


class OwnRequests(bootsteps.Step):
    """Gives tasks whose class is not the app's the request that knows whose they are."""

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        for task in parent.app.tasks.values():
            if task.Request == STOCK_REQUEST:
                task.Request = REQUEST
