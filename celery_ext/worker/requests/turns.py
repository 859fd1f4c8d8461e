"""Lets any number of tasks that need not run hand on their turn in the pool."""

from __future__ import annotations

from typing import Any


class Turns:
    """The turns that a worker's semaphore gives to tasks that wait for a process, one by one.

    Celery gives the next turn within the one of a task that turns out to be revoked, so that some
    hundred of them in a row exceed Python's limit of recursion, which ends the worker.
    """

    def __init__(self, worker: Any) -> None:
        self._give = worker.semaphore.release
        self._free = 0
        self._is_giving = False
        # The pool calls the one, and the worker the other.
        worker.semaphore.release = worker._quick_release = self.release

    def release(self) -> None:
        """Somebody has had his turn."""
        self._free += 1
        if self._is_giving:
            return
        self._is_giving = True
        try:
            while self._free:
                self._free -= 1
                self._give()
        finally:
            self._is_giving = False
