"""Where Celery sends a task."""

from __future__ import annotations

from typing import Any

from celery import Celery


def routed_queue(
    app: Celery, name: str, args: Any = (), kwargs: Any = None, queue: str | None = None
) -> str:
    """The queue that a task is sent to, or "" if it is sent to an exchange of its own."""
    options = {"queue": queue} if queue else {}
    task = app.tasks.get(name)
    if task is not None:
        options = {**task._get_exec_options(), **options}
    found = app.amqp.router.route(options, name, args, kwargs or {})
    target = found.get("queue")
    return str(getattr(target, "name", target) or "")
