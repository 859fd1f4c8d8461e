"""The requests of a worker whose pool has threads or greenlets."""

from __future__ import annotations

import sys
from typing import Any

from celery.worker.request import Request as CeleryRequest

from kombu_delayed.errors import LeaseLost

from ..shutdown.cold_shutdown import CancelledGreenlets
from .request import KILLED, Request, as_result


class PooledRequest(Request):
    """For other pools: it waits there, and has started when a thread or greenlet takes it up."""

    _waits_in_pool = True
    _greenlets = CancelledGreenlets()

    def __init_subclass__(cls, **options: Any) -> None:
        """Celery makes a class for each task, whose `on_success` would ack cancelled tasks too."""
        super().__init_subclass__(**options)
        cls.on_success = _unless_cancelled(cls.on_success)

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        """The pool is about to run it in this thread. Raises an error that prevents it."""
        if not self._may_begin():
            raise _end(f"task {self.name}[{self.id}] is not run: it is in its queue again")
        super().on_accepted(pid, time_accepted)

    def cancel(self, pool: Any, *args: Any, **kwargs: Any) -> None:
        """End it in a cold shutdown, if the pool can. The worker waits for threads.

        Celery's error would interrupt the event loop at any line, and so lose the ack of a task
        that has ended.
        """
        if self.task.acks_late and not self.acknowledged:
            self._greenlets.add(self)
        try:
            CeleryRequest.cancel(self, pool, *args, **kwargs)
        except NotImplementedError:
            self._greenlets.discard(self)


def _unless_cancelled(on_success: Any) -> Any:
    def on_success_unless_cancelled(self: Any, result: Any, **options: Any) -> None:
        result = as_result(result)
        was_killed = tuple(result) == KILLED and self in self._greenlets
        if not was_killed:
            on_success(self, result, **options)
        self._greenlets.end(self, was_killed)

    return on_success_unless_cancelled


def _end(reason: str) -> BaseException:
    """An error that the pool does not report: greenlets would print any other."""
    if "gevent" in sys.modules or "eventlet" in sys.modules:
        from greenlet import GreenletExit  # type: ignore[import-untyped]

        ended: BaseException = GreenletExit(reason)
        return ended
    return LeaseLost(reason)
