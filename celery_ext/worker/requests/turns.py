"""Lets a worker skip any number of tasks in a row."""

from __future__ import annotations

from typing import Any


class Turns:
    """Releases a worker's semaphore, on which tasks wait for a free process, without recursion.

    Celery releases it for the next task while it still handles one that is revoked. Several hundred
    revoked tasks in a row exceed Python's recursion limit, and that ends the worker.
    """

    def __init__(self, worker: Any) -> None:
        self._give = worker.semaphore.release
        self._free = 0
        self._is_giving = False
        # The pool calls one of them, and the worker the other.
        worker.semaphore.release = worker._quick_release = self.release

    def release(self) -> None:
        """Note that a process is free, and let the next task have it."""
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
