"""Tells who listens that messages were buried, in a thread of its own.

A listener may take its time: it must not hold up acks, nor the thread that renews the leases.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from ..connection.native import get_logger

logger = get_logger(__name__)

#: Called with the store, the queue and the ids of dead letters that this process has made.
listeners: list[Callable[[Any, str, list[str]], None]] = []


def tell(store: Any, queue: str, ids: list[str]) -> None:
    """Call all listeners, soon."""
    if ids and listeners:
        try:
            _executor(os.getpid()).submit(_call, store, queue, ids)
        except RuntimeError:  # the interpreter is about to end
            _call(store, queue, ids)


@cache
def _executor(pid: int) -> ThreadPoolExecutor:
    # A fork has no threads of its parent's.
    return ThreadPoolExecutor(1, thread_name_prefix="kombu-delayed-burials")


def _call(store: Any, queue: str, ids: list[str]) -> None:
    for listener in tuple(listeners):
        try:
            listener(store, queue, ids)
        except Exception:
            logger.exception("A listener has failed on dead letters of queue %r", queue)
