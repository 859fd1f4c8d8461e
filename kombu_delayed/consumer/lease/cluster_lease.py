"""The lease of a consumer on a Cluster: a thread for each node, so that none waits for another."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from time import monotonic
from typing import Any

from kombu_delayed.connection.cluster.connection import ClusterConnection
from kombu_delayed.connection.native import get_logger
from kombu_delayed.errors import UNREACHABLE, NodeDown
from kombu_delayed.store.store import Store

from .keeper import keeper
from .lease import Lease

logger = get_logger(__name__)


class ClusterLease(Lease):
    """A lease whose queues are each renewed by the thread of the node that has the queue."""

    def __init__(
        self,
        store: Store,
        seconds: float,
        server: Hashable,
        name: str | None,
        node_of: Callable[[str], Any],
        new_store: Callable[[], Store],
    ) -> None:
        super().__init__(store, seconds, server, name)
        self._node_of = node_of
        #: Makes a store for each node's thread: two may use one node while a slot moves.
        self.new_store = new_store
        self._shares: dict[Any, Share] = {}

    def _watch(self, queue: str) -> None:
        """Renew a queue in the thread of its present node; if it moves, see `queues_on`."""
        self._share(self._node_of(queue))

    def _share(self, node: Any) -> None:
        if node not in self._shares:  # threads of several nodes may see that at once
            keeper((self.server, node)).watch(self._shares.setdefault(node, Share(self, node)))

    def queues_on(self, node: Any) -> list[str]:
        """The queues of this lease that a node has now."""
        found = []
        for queue in sorted(self.queues):
            try:
                home = self._node_of(queue)
            except NodeDown:
                continue
            if home == node:
                found.append(queue)
            else:
                self._share(home)  # it has moved
        return found

    def leave(self, node: Any) -> None:
        """End the thread of a node that has no queue now, as one that was replaced for good."""
        try:
            homes = {self._node_of(queue) for queue in self.queues}
        except NodeDown:  # it may be the home of this queue
            return
        if node in homes or (share := self._shares.pop(node, None)) is None:
            return
        keeper((self.server, node)).forget(share)
        for queue in self.queues:  # one may have come to this node meanwhile
            with suppress(NodeDown):
                self._share(self._node_of(queue))

    def end(self) -> None:
        """Stop renewing."""
        for node, share in list(self._shares.items()):
            keeper((self.server, node)).forget(share)
        self._shares = {}
        with self._lock:
            self._until.clear()  # the shares use it, too, and one may be in the middle of a step

    def successor(self) -> ClusterLease:
        """A lease for the same consumer under a new name."""
        lease = ClusterLease(
            self.store, self.seconds, self.server, self._name, self._node_of, self.new_store
        )
        lease.progress, lease.auto_delete = self.progress, self.auto_delete
        return lease


class Share(Lease):
    """The part of a lease for the queues of one node, which has its own clock."""

    def __init__(self, whole: ClusterLease, node: Any) -> None:
        self._whole = whole
        self._node = node
        self.store, self.seconds, self.server = whole.new_store(), whole.seconds, whole.server
        run = self.store.run
        assert isinstance(run, ClusterConnection)
        run.format = None  # the loop checks it: it may be on another node
        run.may_rest = False  # its thread has nothing else to do than try
        self.consumer = whole.consumer
        self.progress, self.auto_delete = whole.progress, whole.auto_delete
        self.next_step_at = monotonic()
        self._until, self._lock = whole._until, whole._lock
        self._begin_contact()

    @property
    def lost(self) -> bool:
        """Whether it has ended on any node."""
        return self._whole.lost

    @lost.setter
    def lost(self, lost: bool) -> None:
        self._whole.lost = lost

    @property
    def outlasted(self) -> int:
        """How many times the lease was registered again on any node."""
        return self._whole.outlasted

    @outlasted.setter
    def outlasted(self, times: int) -> None:
        self._whole.outlasted = times

    def step(self) -> float:
        """Renew on the queues of this node; returns seconds until the next step."""
        try:
            queues = self._whole.queues_on(self._node)
            if not queues:
                self._whole.leave(self._node)
            seconds = self._keep(queues)
        except UNREACHABLE as error:  # which the consumer reports once
            logger.info("Cannot renew the leases on node %s now: %s", self._node, error)
            return self._lost_contact()
        self._check_progress()
        return seconds
