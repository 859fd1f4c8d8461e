"""Leases: a consumer keeps its unacked messages while a thread of its process renews its lease."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import cached_property, partial
from typing import TypeVar

from kombu_delayed.connection import native
from kombu_delayed.errors import UNREACHABLE
from kombu_delayed.store.leases import Renewal
from kombu_delayed.store.store import Store

from .consumer_id import consumer_id
from .contact import Contact
from .keeper import keeper
from .reclaim import Reclaimer
from .standstill import Progress

logger = native.get_logger(__name__)

T = TypeVar("T")

#: A clock that also runs while the machine sleeps, if there is one.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

#: A lease is renewed when less than this fraction of it is left.
RENEW_BELOW = 0.7

#: A consumer of more queues than this is registered for longer in queues where it holds nothing …
FEW_QUEUES = 50

#: … for this many leases, so that renewals are rare.
IDLE_LEASES = 4

#: If a lease on the server is shorter than believed by this fraction, the consumer renews all.
DOUBT = 0.2


class Lease:
    """One consumer's hold on its unacked messages, over all its queues.

    The keeper's thread calls `step`, other threads the rest. They share neither the connections of
    `store` nor a lock that gevent or eventlet has patched.
    """

    #: The progress of the loop that hands out what the consumer has claimed.
    progress: Progress | None = None

    #: The clock of all leases, in seconds.
    clock = staticmethod(partial(time.clock_gettime, _CLOCK))

    def __init__(
        self, store: Store, seconds: float, server: Hashable = None, name: str | None = None
    ) -> None:
        self.store = store
        self.server = server
        self._name = name
        self.consumer = consumer_id(name, seconds)
        self.seconds = seconds
        self.lost = False
        #: How many times it was registered again with a server that did not know it.
        self.outlasted = 0
        self.next_step_at = 0.0
        #: Queue -> the time until which the lease lasts at least, by `clock`.
        self._until: dict[str, float] = {}
        #: Queues that delete themselves.
        self.auto_delete: set[str] = set()
        self._lock = native.lock()
        self._begin_contact()

    def _begin_contact(self) -> None:
        self._contact = Contact(self.seconds)
        self._others = Reclaimer(self.store, self.seconds, self.server, self._contact)
        #: The last renewal may contradict what is known here: renew in all queues.
        self._is_in_doubt = False

    @cached_property
    def ms(self) -> int:
        """Its length in milliseconds."""
        return int(self.seconds * 1000)

    @property
    def queues(self) -> frozenset[str]:
        """The queues for which it has been granted."""
        return frozenset(self._until)

    def holds(self, queue: str) -> bool:
        """Whether it has been granted for a queue, as far as is known here."""
        return queue in self._until

    def may_have_ended(self, queue: str) -> bool:
        """Whether others may have the messages, because this process was stopped or cut off."""
        return self.lost or self.clock() >= self._until.get(queue, -math.inf)

    def ask(self, queue: str) -> tuple[float, float]:
        """Prepare for a deliver, which may shorten a long lease; returns the times for `grant`."""
        with self._lock:
            asked_at, until = self.clock(), self._until.get(queue, -math.inf)
            if queue in self._until:
                self._until[queue] = min(until, asked_at + self.seconds)
        return asked_at, until

    def grant(self, queue: str, asked: tuple[float, float], has_taken: bool = True) -> None:
        """Note that deliver has granted the lease; if it took no messages, a longer one stays."""
        asked_at, before = asked
        with self._lock:
            is_new = queue not in self._until
            self._until[queue] = max(asked_at + self.seconds, -math.inf if has_taken else before)
        if is_new:
            self._watch(queue)

    def _watch(self, queue: str) -> None:
        keeper(self.server).watch(self)

    def suspect(self, queue: str) -> None:
        """Distrust what is known of a queue: the next call finds out whether the lease lasts."""
        self.grant(queue, (-math.inf, -math.inf))

    def forget(self, queue: str) -> None:
        """Do not renew it in a queue any more."""
        with self._lock:
            self._until.pop(queue, None)
        self.auto_delete.discard(queue)

    def renew(self, queue: str, store: Store) -> bool:
        """Renew the lease in one queue; returns whether it has lasted."""
        asked_at = self.clock()
        lasts = not self.lost and store.leases.renew(queue, self.consumer, self.ms) is not None
        if self.lost or not (lasts or self._register_again(queue, store)):
            self.lost = True
            return False
        with self._lock:
            if queue in self._until:
                self._until[queue] = asked_at + self.seconds
        return True

    def outlast_data(self, queue: str, store: Store, register: Callable[[], T | None]) -> T | None:
        """Register again with a server that does not know this lease; None if it has ended.

        The server has lost its data if the lease has not ended by this process's clock and nobody
        has reclaimed it. The clock is not enough: a pause of a virtual machine may have stopped it.
        """
        if self.may_have_ended(queue) or store.leases.was_reclaimed(queue, self.consumer):
            return None
        answer = register()
        if answer is not None:
            self.outlasted += 1
            logger.warning(
                "The server has lost its data: consumer %s keeps the messages of queue %r it holds",
                self.consumer,
                queue,
            )
        return answer

    def _register_again(self, queue: str, store: Store) -> bool:
        deliver = partial(store.deliver, queue, self.consumer, want=0, tag=0, lease_ms=self.ms)
        register = partial(deliver, waits=False, promotions=0)
        return self.outlast_data(queue, store, register) is not None

    def end(self) -> None:
        """Stop renewing."""
        keeper(self.server).forget(self)
        self._until = {}

    def successor(self) -> Lease:
        """A lease for the same consumer under a new name."""
        lease = Lease(self.store, self.seconds, self.server, self._name)
        lease.progress, lease.auto_delete = self.progress, self.auto_delete
        return lease

    # The work of the keeper's thread.

    def step(self) -> float:
        """Renew in every queue, and reclaim what others left; returns seconds until the next step.

        That is a third of the lease, or less if the lease of a dead consumer ends before.
        """
        seconds = self._keep(sorted(self.queues))
        self._check_progress()
        return seconds

    def hang_up(self) -> None:
        """Close the connections. `store` opens others if it is used again."""
        self.store.hang_up()

    def _check_progress(self) -> None:
        if self.progress is None or self.lost:
            return
        try:
            self.progress.check(self.store, self.consumer)
        except UNREACHABLE as error:  # the next step tries again; renewals do not wait for it
            logger.info("Cannot return messages that have not started now: %s", error)

    def _keep(self, queues: list[str]) -> float:
        if self.lost or not queues:
            return self.seconds / 3
        asked_at = self.clock()
        known = {queue: self._until.get(queue, -math.inf) for queue in queues}
        due_at = math.inf if self._is_in_doubt else asked_at + self.seconds * RENEW_BELOW
        renewed = {queue: until for queue, until in known.items() if until <= due_at}
        try:
            renewal = self._renew_all(queues, renewed, asked_at)
        except BaseException:
            self._lost_contact()
            raise
        lost = [queue for queue in renewal.lost if self.holds(queue)]  # others were left meanwhile
        if not all(self._register_again(queue, self.store) for queue in lost):
            self.lost = True
            return self.seconds / 3
        if lost or not renewal.now_ms:
            return self._lost_contact()
        if self._is_certain(renewal, known, asked_at) or len(renewed) == len(queues):
            self._is_in_doubt = False
            with suppress(*UNREACHABLE):  # it is done again in a while
                self.store.dictionaries.tidy(queues)
            wait = self._retry_seconds if renewal.failed else self.seconds / 3
            return min(wait, self._others.step(renewal, self.clock))
        self._is_in_doubt = True
        return 0

    def _lost_contact(self) -> float:
        self._contact.broke()
        self._is_in_doubt = True
        return self._retry_seconds

    @property
    def _retry_seconds(self) -> float:
        return min(1.0, self.seconds / 10)

    def _is_certain(self, renewal: Renewal, known: dict[str, float], asked_at: float) -> bool:
        """Whether this lease has as much time left on the server as this process believes."""
        heard_at = self.clock()
        starts = keeper(self.server)
        starts.began_at = heard_at if starts.began_at is None else starts.began_at
        if not self._contact.heard(asked_at, heard_at, renewal.now_ms):
            return False
        if renewal.own_end_ms is None:
            return True
        left_seconds = (renewal.own_end_ms - renewal.now_ms) / 1000
        believed_seconds = min(known.values()) - asked_at
        if left_seconds < min(believed_seconds, self.seconds) - self.seconds * DOUBT:
            self._contact.broke()  # the server has older data: leases of others are older, too
        return left_seconds >= believed_seconds - self.seconds * DOUBT

    def _renew_all(self, queues: list[str], renewed: dict[str, float], asked_at: float) -> Renewal:
        idle_seconds = self.seconds * (IDLE_LEASES if len(queues) > FEW_QUEUES else 1)
        renewal = self.store.leases.renew_all(
            queues,
            renewed.keys(),
            self.consumer,
            self.ms,
            int(idle_seconds * 1000),
            self.auto_delete,
        )
        unknown = {*renewal.lost, *renewal.failed}
        with self._lock:
            for queue, until in renewed.items():
                # Another deliver may have shortened it meanwhile, before this call or after it.
                if queue not in unknown and self._until.get(queue) == until:
                    seconds = idle_seconds if queue in renewal.idle else self.seconds
                    self._until[queue] = asked_at + seconds
        return renewal
