"""A backend for Django's own tasks, which workers of a Celery app run."""

from __future__ import annotations

try:
    import django.tasks  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"celery_ext.django runs the tasks of Django 6 and later, which is not here: {error}"
    ) from error

from . import worker
from .backend import CeleryBackend

__all__ = ["CeleryBackend", "worker"]
