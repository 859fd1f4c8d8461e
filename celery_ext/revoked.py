"""The result of a task that was cancelled before it ran."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celery import Celery
from celery.app.task import Context
from celery.utils.log import get_logger
from kombu.transport.virtual import Message

from .task_info import TaskInfo

logger = get_logger(__name__)


def store_revoked(app: Celery, info: TaskInfo) -> None:
    """Tell the result backend, and with it the chord that a task is part of."""
    if not info.id or info.headers.get("ignore_result"):
        return
    try:
        app.backend.mark_as_revoked(
            info.id, reason="cancelled", request=_request(app, info), store_result=True
        )
    except Exception as error:  # the task is gone from the broker whatever the backend says
        logger.warning("Task %s is cancelled, but its result is not stored: %s", info.id, error)


def _request(app: Celery, info: TaskInfo) -> Context:
    headers = info.headers
    return Context({**headers, **_embedded(app, info)}, task=info.task, called_directly=False)


def _embedded(app: Celery, info: TaskInfo) -> dict[str, Any]:
    """Callbacks, chain and chord: the third part of a task's body."""
    try:
        body = Message(info.payload, accept=set(app.conf.accept_content)).payload
    except Exception:  # another serializer than this process has, or signed
        return {}
    if isinstance(body, Sequence) and len(body) == 3 and isinstance(body[2], dict):
        return body[2]
    return {}
