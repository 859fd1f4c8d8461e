"""Leases: a consumer keeps its unacked messages for as long as a thread of its process says so."""

from __future__ import annotations

import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Hashable
from functools import partial
from time import monotonic
from typing import Protocol, TypeVar

from kombu.log import get_logger

from .store import Delivered, Store

logger = get_logger(__name__)

T = TypeVar("T")

#: A clock that also goes on while the machine sleeps, where there is one.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

#: Who looks for a lease that ends looks so long afterwards.
JUST_AFTER_SECONDS = 0.01


def consumer_id(name: str | None = None) -> str:
    """What no other consumer is called: a name or else the host's, process id, chance."""
    return f"{name or socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


class Lease:
    """One consumer's hold on what it has not acked, over all its queues."""

    def __init__(
        self, store: Store, seconds: float, server: Hashable = None, name: str | None = None
    ) -> None:
        self.store = store
        self.server = server
        self._name = name
        self.consumer = consumer_id(name)
        self.seconds = seconds
        self.lost = False
        self.next_step_at = 0.0
        #: Queue -> when it was last asked for: it lasts from then on at least.
        self._asked_at: dict[str, float] = {}

    @property
    def ms(self) -> int:
        """Its length in milliseconds."""
        return int(self.seconds * 1000)

    @staticmethod
    def clock() -> float:
        """Seconds, by the clock that `grant` goes by."""
        return time.clock_gettime(_CLOCK)

    @property
    def queues(self) -> frozenset[str]:
        """The queues for which it has been granted."""
        return frozenset(self._asked_at)

    def holds(self, queue: str) -> bool:
        """Whether it has been granted for a queue, as far as is known here."""
        return queue in self._asked_at

    def may_have_ended(self, queue: str) -> bool:
        """Whether others may have what was claimed, as this process was stopped or cut off."""
        return self.lost or self.clock() - self._asked_at.get(queue, -math.inf) >= self.seconds

    def grant(self, queue: str, asked_at: float) -> None:
        """A deliver that was sent at a time of `clock` has granted it for a queue."""
        is_new = queue not in self._asked_at
        self._asked_at[queue] = asked_at
        if is_new:
            keeper(self.server).watch(self)

    def renew(self, queue: str, store: Store) -> list[str] | None:
        """Make it last. Returns consumers whose lease has ended; None: this one's has."""
        asked_at, known = self.clock(), self._asked_at
        dead = None if self.lost else store.renew(queue, self.consumer, self.ms)
        register = partial(self._register, queue, store)
        if dead is None and self.outlast_data(queue, register) is not None:
            dead = []
        if dead is None:
            self.lost = True
        elif queue in known:
            known[queue] = asked_at
        return dead

    def outlast_data(self, queue: str, register: Callable[[], T | None]) -> T | None:
        """Register again with a server that does not know this lease; None: it has ended.

        The server has lost its data if the lease has not ended by this process's clock: nobody can
        have reclaimed it.
        """
        answer = None if self.may_have_ended(queue) else register()
        if answer is not None:
            logger.warning(
                "The server has lost its data: consumer %s goes on with what it holds of queue %r",
                self.consumer,
                queue,
            )
        return answer

    def _register(self, queue: str, store: Store) -> Delivered | None:
        return store.deliver(
            queue, self.consumer, 0, 0, lease_ms=self.ms, waits=False, promotions=0
        )

    def end(self) -> None:
        """Renew no more."""
        keeper(self.server).forget(self)
        self._asked_at = {}

    def successor(self) -> Lease:
        """A lease for the same consumer under a new name."""
        return Lease(self.store, self.seconds, self.server, self._name)

    def step(self) -> float:
        """Renew on every queue and reclaim what others left behind; returns seconds until next.

        That is a third of the lease, or when another one's ends that nobody renews any more.
        """
        return min((self.keep(queue) for queue in self.queues), default=self.seconds / 3)

    def keep(self, queue: str) -> float:
        """Renew on one queue and reclaim what others left behind in it; returns as `step`."""
        for consumer in self.renew(queue, self.store) or ():
            self._reclaim(queue, consumer)
        end_ms = self.store.soonest_end_ms(queue, self.consumer)
        if end_ms is None:
            return self.seconds / 3
        return min(self.seconds / 3, end_ms / 1000 + JUST_AFTER_SECONDS)

    def _reclaim(self, queue: str, consumer: str) -> None:
        count = self.store.reclaim(queue, consumer)
        if count:
            logger.warning(
                "Consumer %s has stopped answering: its %d unacknowledged messages are back in "
                "queue %r",
                consumer.encode(errors="surrogateescape").decode(errors="backslashreplace"),
                count,
                queue,
            )


class Kept(Protocol):
    """What a keeper looks after: it says after each step when it needs another."""

    consumer: str
    seconds: float
    next_step_at: float

    def step(self) -> float:
        """Do what is due; returns seconds until the next step."""


class Keeper:
    """The thread that renews this process's leases on one server, whatever its tasks do."""

    def __init__(self) -> None:
        self._leases: set[Kept] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def watch(self, lease: Kept) -> None:
        """Renew a lease from now on."""
        with self._changed:
            if lease in self._leases:
                return
            lease.next_step_at = monotonic()  # who starts may find what the dead have left
            self._leases.add(lease)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name="kombu-delayed-leases", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def hurry(self, lease: Kept) -> None:
        """Have its next step now."""
        with self._changed:
            lease.next_step_at = monotonic()
            self._changed.notify()

    def forget(self, lease: Kept) -> None:
        """Renew a lease no more."""
        with self._changed:
            self._leases.discard(lease)
            self._changed.notify()

    def step(self) -> float | None:
        """Do what is due; returns seconds until the next step, or None with no lease left."""
        with self._changed:
            due = [lease for lease in self._leases if lease.next_step_at <= monotonic()]
        for lease in due:
            lease.next_step_at = math.inf
            seconds = self._step(lease)
            with self._changed:  # another thread may have hurried it meanwhile
                lease.next_step_at = min(lease.next_step_at, monotonic() + seconds)
        with self._changed:
            return self._wait_seconds()

    def _wait_seconds(self) -> float | None:
        if not self._leases:
            return None
        return max(min(each.next_step_at for each in self._leases) - monotonic(), 0)

    def _step(self, lease: Kept) -> float:
        try:
            return lease.step()
        except Exception as error:  # whatever it is, the other leases need this thread
            logger.warning("Cannot renew the lease of %s now: %s", lease.consumer, error)
            return min(1.0, lease.seconds / 10)

    def _run(self) -> None:
        while True:
            self.step()
            with self._changed:
                if (wait_seconds := self._wait_seconds()) is None:
                    self._thread = None
                    return
                self._changed.wait(wait_seconds)


_keepers: dict[tuple[int, Hashable], Keeper] = {}
_keepers_lock = threading.RLock()


def keeper(server: Hashable = None) -> Keeper:
    """This process's keeper for a server: one that hangs must not cost the leases on others."""
    with _keepers_lock:
        return _keepers.setdefault((os.getpid(), server), Keeper())


def _forget_parents() -> None:
    global _keepers_lock
    _keepers_lock = threading.RLock()
    _keepers.clear()


os.register_at_fork(after_in_child=_forget_parents)
