"""A task in a worker, which starts only while it is the worker's."""

from __future__ import annotations

import threading
from typing import Any

from celery.worker.request import Request as CeleryRequest

from kombu_delayed.errors import LeaseLost


class Request(CeleryRequest):
    """Celery's own. Tasks wait in a pool of threads or greenlets, and others may get them there.

    When a worker was stopped for longer than its lease, Celery takes back what waits in its prefork
    pool; these pools have no way to.
    """

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        """The pool is about to run it, in this thread. Raises LeaseLost where it is others'."""
        in_pool = threading.current_thread() is not threading.main_thread()
        if in_pool and not self._is_held():
            raise LeaseLost(f"task {self.name}[{self.id}] is not run: another worker has it")
        super().on_accepted(pid, time_accepted)

    def _is_held(self) -> bool:
        message = self.message
        holds: Any = getattr(message.channel, "holds", None)
        return holds is None or bool(holds(message.delivery_tag))
