"""Lets results for `rpc://` expire, whether their client waits for them or is long gone."""

from __future__ import annotations

from functools import wraps
from typing import Any

from celery.backends.rpc import RPCBackend

from kombu_delayed.transport.replies import lifetimes


def install() -> None:
    """Note which queues get results of this process. Safe to call twice."""
    find = RPCBackend.destination_for
    if hasattr(find, "__wrapped__"):
        return

    @wraps(find)
    def destination_for(backend: Any, task_id: str, request: Any) -> tuple[str, str]:
        queue, correlation_id = find(backend, task_id, request)
        if queue and backend.expires:
            lifetimes.note(queue, int(backend.expires * 1000))
        return queue, correlation_id

    RPCBackend.destination_for = destination_for
