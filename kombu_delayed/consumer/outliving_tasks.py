"""Looks after what a closed channel leaves: running tasks, and messages it could not give back."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING

from ..errors import UNREACHABLE, AccessDenied
from ..store.global_limits import is_pool
from .lease.keeper import keeper
from .lease.lease import Lease
from .outbox import Outbox

if TYPE_CHECKING:
    from ..store.store import Store
    from .unacked import QoS


class Remaining:
    """Keeps the lease of a consumer whose channel is closed for as long as its tasks have slots.

    A worker that opens a new channel after a lost connection continues the tasks it has started.
    `running` returns the tags of a queue's messages with such tasks; `report` sends their slots of
    a global limit. Messages that have not started go back as soon as the broker is reached. In
    queues without running tasks they go back only until the lease expires: then others reclaim
    them. Before messages go back, the `outbox` sends the acks and rejects that the broker missed.
    """

    def __init__(
        self,
        lease: Lease,
        queues: Collection[str],
        outbox: Outbox,
        running: Callable[[str], Collection[int | str]],
        report: Callable[[Store, str, int, str], None] = lambda *_: None,
    ) -> None:
        self.consumer, self.seconds = lease.consumer, lease.seconds
        self.next_step_at = 0.0
        self._store = lease.store
        self._lease = lease
        self._keeper = keeper(lease.server)
        self._queues = {*queues}
        self._running = running
        self._report = report
        self._outbox = outbox
        self._lease_ends_at = monotonic() + lease.seconds
        self._pid = os.getpid()

    def start(self) -> None:
        """Keep the lease from now on, until the process ends at the latest."""
        atexit.register(self._leave)
        self._keeper.watch(self)

    def hurry(self) -> None:
        """Take the next step now, because a task has ended."""
        self._keeper.hurry(self)

    def step(self) -> float:
        """Give back messages whose tasks have ended; returns seconds until the next step.

        Also gives back what could not be given back when the channel was closed.
        """
        failed: BaseException | None = None
        late = self._outbox.queues
        if late:
            self._outbox.settle(self._store, self._lease)
        for queue in tuple(self._queues):
            try:
                is_done = self._give_back(queue, queue in late)
            except self._store.errors_of_one_queue as error:
                failed = error
                continue
            if is_done:
                self._queues.discard(queue)
        if failed is not None:
            raise failed
        if not self._queues:
            self._keeper.forget(self)
            atexit.unregister(self._leave)
        return self.seconds / 3

    def _give_back(self, queue: str, is_late: bool) -> bool:
        """Give back messages of one queue; returns whether nothing is left to do."""
        has_ended = monotonic() >= self._lease_ends_at
        if has_ended and not is_late and not self._running(queue):
            return True  # others reclaim it
        if is_pool(queue):
            self._report(self._store, self.consumer, self._lease.ms, queue)
        tags = self._running(queue)
        leases = self._store.leases
        leases.leave(queue, self.consumer, tags)
        return not tags or leases.renew(queue, self.consumer, self._lease.ms) is None

    def hang_up(self) -> None:
        """Close the connections, which it has from the lease."""
        self._store.hang_up()

    def _leave(self) -> None:
        if self._pid == os.getpid():
            self._keeper.forget(self)
            store = self._store.over(self._store.client)  # the other connection is the keeper's
            with suppress(*UNREACHABLE, AccessDenied):  # it ends with the lease
                for queue in filter(self._running, tuple(self._queues)):
                    store.leases.leave(queue, self.consumer)


def remain(
    lease: Lease, queues: Collection[str], qos: QoS, kept: Collection[str]
) -> Remaining | None:
    """Keep the lease for running tasks, and give back the messages of `kept` queues.

    Returns None if there is nothing to do.
    """
    slots = qos.slots
    left = [queue for queue in queues if slots.running(queue) or queue in kept]
    if not left:
        return None
    qos.outbox.outlive_channel()
    remaining = Remaining(lease, left, qos.outbox, slots.running, slots.shared.report)
    remaining.start()
    return remaining
