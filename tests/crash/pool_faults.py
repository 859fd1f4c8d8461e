"""Faults of pools: their processes are replaced, they grow, and a greenlet keeps them busy."""

from __future__ import annotations

import contextlib
import threading
import time

from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from tests.crash.faults import Faults
from tests.crash.load import LIMIT_SECONDS

TERMINATE_SECONDS = 25.0
TERMINATE_EVERY_SECONDS = 1.0
#: A greenlet does not yield for so many leases, at least and at most.
NO_YIELD_LEASES = 1.3, 2.0
#: A pool of one process grows by that.
BURST, BURST_TASK_SECONDS = 12, 0.5


class PoolFaults(Faults):
    """Each sends tasks to the pools that it is for."""

    def _time_limit(self) -> str:
        for late in (True, False):
            self.field.senders.send_overrun(late, limit_seconds=LIMIT_SECONDS)
        return "child"

    def _terminate(self) -> str:
        """Begin a task that would take long, then revoke it until it has ended."""
        id = self.field.senders.send_overrun(late=self.rng.random() < 0.5)
        self._revoke_later(id, time.monotonic() + TERMINATE_SECONDS)
        return "child"

    def _revoke_later(self, id: str, until: float) -> None:
        def revoke() -> None:
            if self.field.ended(id) or time.monotonic() > until:
                return
            if self.field.started(id):  # in a thread: it waits where the network stands still
                threading.Thread(target=self._revoke, args=(id,), daemon=True).start()
            self._revoke_later(id, until)

        self._in(TERMINATE_EVERY_SECONDS, revoke)

    def _revoke(self, id: str) -> None:
        with contextlib.suppress(OperationalError, RedisError, OSError):
            self.field.senders.app.control.revoke(id, terminate=True)

    def _autoscale(self) -> str:
        for _ in range(BURST):
            self.field.senders.send_long(BURST_TASK_SECONDS, "prefork")
        return "pool"

    def _no_yield(self) -> str:
        leases = self.rng.uniform(*NO_YIELD_LEASES)
        self.field.senders.send_busy(leases * self.lease_seconds)
        return "greenlets"
