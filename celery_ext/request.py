"""A task in a worker, which begins only while its message is the worker's.

A worker that ends gives back what it has not begun, and one that was stopped for longer than its
lease has lost it. Celery takes such tasks out of some of its pools only, or later.
"""

from __future__ import annotations

import sys
from typing import Any

from celery.utils.log import get_logger
from celery.worker.request import Request as CeleryRequest
from celery.worker.state import task_ready

from kombu_delayed.errors import LeaseLost

logger = get_logger(__name__)


class Request(CeleryRequest):
    """Celery's own, for a pool of processes: it has begun when the pool is given it."""

    _begins: bool | None = None

    def __init__(self, message: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(message, *args, **kwargs)
        waits = getattr(message.channel, "waits", None)
        if waits is not None:
            waits(message.delivery_tag)

    def revoked(self) -> bool:
        """Whether it must not run. The worker asks this before it gives it to its pool."""
        return bool(super().revoked()) or not self._may_begin()

    def _may_begin(self) -> bool:
        if self._begins is None:
            begins: Any = getattr(self.message.channel, "begins", None)
            self._begins = begins is None or bool(begins(self.message.delivery_tag))
            if not self._begins:
                logger.info("Task %s[%s] is not run: it is in its queue again", self.name, self.id)
                task_ready(self)
        return self._begins


class PooledRequest(Request):
    """For other pools: it waits there, and has begun when a thread or greenlet takes it up."""

    def revoked(self) -> bool:
        """Whether it is known to have been revoked."""
        return bool(CeleryRequest.revoked(self))

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        """The pool is about to run it, in this thread. Raises what ends that."""
        if not self._may_begin():
            raise _end(f"task {self.name}[{self.id}] is not run: it is in its queue again")
        super().on_accepted(pid, time_accepted)


def _end(reason: str) -> BaseException:
    """An error that the pool keeps to itself: greenlets would print any other."""
    if "gevent" in sys.modules or "eventlet" in sys.modules:
        from greenlet import GreenletExit  # type: ignore[import-untyped]

        ended: BaseException = GreenletExit(reason)
        return ended
    return LeaseLost(reason)
