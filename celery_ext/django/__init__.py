"""A backend for Django's own tasks, which workers of a Celery app run."""

from __future__ import annotations

try:
    import django.tasks  # noqa: F401
except ImportError as error:
    raise ImportError(
        "celery_ext.django runs the tasks of Django 6 and later. With an older Django, leave it "
        f"out of the app's imports (CELERY_IMPORTS): {error}"
    ) from error

from . import worker
from .backend import CeleryBackend

__all__ = ["CeleryBackend", "worker"]
