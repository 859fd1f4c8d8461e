"""What workers of an extended app do besides."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from celery import bootsteps


class Inspection(bootsteps.Step):
    """Lets `celery inspect` show the backlog."""

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        # Only workers need Celery's worker modules.
        import_module("celery_ext.inspect")
        super().__init__(parent, **kwargs)
