"""Tells a worker which tasks were revoked while it was away."""

from __future__ import annotations

import time
from math import inf
from threading import Thread
from typing import Any

from celery import bootsteps
from celery.utils.log import get_logger
from celery.worker import state

from ...control.changes.revoked import Revoked
from ...errors import BROKER_FAILS, BrokerError

logger = get_logger(__name__)

#: How often a worker checks whether it is time to read.
TICK_SECONDS = 5.0

#: How often a worker reads which tasks were revoked, and how far back before its last read, because
#: clocks differ.
READ_SECONDS, OVERLAP_SECONDS = 600.0, 60.0

#: How often it reads all of them. Celery forgets each after three hours.
WHOLE_SECONDS = 3_600.0


class RevokedTasks(bootsteps.StartStopStep):
    """Applies revokes that were sent while this worker, or every worker, was away.

    It starts again with each new connection to the broker.
    """

    requires = ("celery.worker.consumer.connection:Connection",)

    _timer: Any = None

    def start(self, parent: Any) -> None:
        self._revoked = Revoked(parent.app.delayed)
        self._read_at = self._whole_at = -inf
        self._found: list[str] = []
        self._thread: Thread | None = None
        try:
            self._read()
        except BrokerError:  # a broker without a backlog
            return
        self._add()
        self._timer = parent.timer.call_repeatedly(TICK_SECONDS, self._tick)

    def stop(self, parent: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        """Read in a thread, because the worker's event loop, which calls this, must not block."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._add()
        if time.monotonic() - self._read_at >= READ_SECONDS:
            self._thread = Thread(target=self._read, name="delayed-revoked", daemon=True)
            self._thread.start()

    def _read(self) -> None:
        now = time.monotonic()
        is_whole = now - self._whole_at >= WHOLE_SECONDS
        since = 0 if is_whole else time.time() - (now - self._read_at) - OVERLAP_SECONDS
        try:
            self._found = self._revoked.since(since)
        except BrokerError:
            raise
        except BROKER_FAILS as error:
            logger.warning("The list of revoked tasks could not be read: %s", error)
            return
        self._read_at = now
        if is_whole:
            self._whole_at = now

    def _add(self) -> None:
        found, self._found = self._found, []
        for id in found:
            state.revoked.add(id)
