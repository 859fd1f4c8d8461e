"""The thread that keeps the leases of a process, even while its tasks block."""

from __future__ import annotations

import math
import os
from collections.abc import Hashable
from time import monotonic
from typing import Any, Protocol

from kombu_delayed.connection import forks, native

logger = native.get_logger(__name__)


class Kept(Protocol):
    """Something that a keeper looks after. After each step it says when it needs another."""

    consumer: str
    seconds: float
    next_step_at: float

    def step(self) -> float:
        """Do what is due; returns seconds until the next step."""

    def hang_up(self) -> None:
        """Close the connections when it is kept no more, in the thread that has used them."""


class Keeper:
    """The thread that renews this process's leases on one server.

    It is a native thread, under gevent and eventlet, too. So it shares no connection with
    greenlets, and no lock except its own, which is never held for long. A gevent socket belongs to
    the thread that has opened it: no other thread uses or closes it.
    """

    #: When this process first heard from the server, by the clock of leases.
    began_at: float | None = None

    def __init__(self) -> None:
        self._leases: set[Kept] = set()
        #: Leases whose last step has failed, which was logged.
        self._failing: set[Kept] = set()
        #: Leases that were forgotten, and whose connections are still open.
        self._forgotten: list[Kept] = []
        self._lock = native.lock()
        self._bell = native.Bell()
        self._is_running = False

    def watch(self, lease: Kept) -> None:
        """Renew a lease from now on."""
        with self._lock:
            if lease in self._leases:
                return
            lease.next_step_at = monotonic()  # its contact with the server begins
            self._leases.add(lease)
            if not self._is_running:
                native.start_thread(self._run, "kombu-delayed-leases")
                self._is_running = True
        self._bell.ring()

    def hurry(self, lease: Kept) -> None:
        """Take the next step of a lease now."""
        with self._lock:
            lease.next_step_at = monotonic()
        self._bell.ring()

    def forget(self, lease: Kept) -> None:
        """Stop renewing a lease."""
        with self._lock:
            if lease in self._leases:
                self._leases.remove(lease)
                self._forgotten.append(lease)
        self._bell.ring()

    def step(self) -> float | None:
        """Do what is due; returns seconds until the next step, or None if no lease is left."""
        with self._lock:
            forgotten, self._forgotten = self._forgotten, []
        for lease in forgotten:
            self._failing.discard(lease)
            self._hang_up(lease)
        with self._lock:
            due = [lease for lease in self._leases if lease.next_step_at <= monotonic()]
        for lease in due:
            lease.next_step_at = math.inf
            seconds = self._step(lease)
            with self._lock:  # another thread may have hurried it meanwhile
                lease.next_step_at = min(lease.next_step_at, monotonic() + seconds)
        with self._lock:
            return self._wait_seconds()

    def _wait_seconds(self) -> float | None:
        if self._forgotten:
            return 0
        if not self._leases:
            return None
        return max(min(each.next_step_at for each in self._leases) - monotonic(), 0)

    def _step(self, lease: Kept) -> float:
        try:
            seconds = lease.step()
        except Exception as error:  # the other leases need this thread after any error
            if lease in self._leases:  # else its connection was closed meanwhile
                log = logger.debug if lease in self._failing else logger.warning
                log("Cannot renew the lease of %s now: %s", lease.consumer, error)
                self._failing.add(lease)
            return min(1.0, lease.seconds / 10)
        self._failing.discard(lease)
        return seconds

    def _hang_up(self, lease: Kept) -> None:
        try:
            lease.hang_up()
        except Exception as error:
            logger.debug("Cannot close the connections of %s: %s", lease.consumer, error)

    def _run(self) -> None:
        while True:
            self.step()
            with self._lock:
                wait_seconds = self._wait_seconds()
                if wait_seconds is None:
                    self._is_running = False
                    return
            self._bell.wait(wait_seconds)


_keepers: dict[tuple[int, Hashable], Keeper] = {}
_keepers_lock: Any = native.lock()


def keeper(server: Hashable = None) -> Keeper:
    """This process's keeper for a server. A server that hangs must not cost leases on others."""
    with _keepers_lock:
        return _keepers.setdefault((os.getpid(), server), Keeper())


def _forget_parents() -> None:
    global _keepers_lock
    _keepers_lock = native.lock()
    _keepers.clear()


forks.in_children(_forget_parents)
