"""The lease of a consumer on a Cluster: a thread for each node, so that none waits for another."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from time import monotonic

from kombu.log import get_logger

from .errors import UNREACHABLE, NodeDown
from .lease import Lease, keeper
from .store import Store

logger = get_logger(__name__)


class ClusterLease(Lease):
    """As any lease; each queue is renewed by the thread of the node that has it."""

    def __init__(
        self,
        store: Store,
        seconds: float,
        server: Hashable,
        name: str | None,
        node_of: Callable[[str], Hashable],
    ) -> None:
        super().__init__(store, seconds, server, name)
        self._node_of = node_of
        self._shares: dict[Hashable, Share] = {}

    def grant(self, queue: str, asked_at: float) -> None:
        """As `Lease.grant`; in whichever node's thread it is to be renewed now."""
        self._asked_at[queue] = asked_at
        self._share(self._node_of(queue))

    def _share(self, node: Hashable) -> None:
        if node not in self._shares:  # threads of several nodes may see that at once
            keeper((self.server, node)).watch(self._shares.setdefault(node, Share(self, node)))

    def queues_on(self, node: Hashable) -> list[str]:
        """Those of its queues that a node has now."""
        found = []
        for queue in self.queues:
            try:
                home = self._node_of(queue)
            except NodeDown:
                continue
            if home == node:
                found.append(queue)
            else:
                self._share(home)  # it has moved
        return found

    def end(self) -> None:
        """Renew no more."""
        for node, share in list(self._shares.items()):
            keeper((self.server, node)).forget(share)
        self._shares, self._asked_at = {}, {}

    def successor(self) -> ClusterLease:
        """A lease for the same consumer under a new name."""
        return ClusterLease(self.store, self.seconds, self.server, self._name, self._node_of)


class Share(Lease):
    """The part of a lease that is over the queues of one node."""

    def __init__(self, whole: ClusterLease, node: Hashable) -> None:
        self._whole = whole
        self._node = node
        self.store, self.seconds = whole.store, whole.seconds
        self.consumer = whole.consumer
        self.next_step_at = monotonic()

    def step(self) -> float:
        """Renew on the queues of this node; returns seconds until the next step."""
        queues = self._whole.queues_on(self._node)
        return min(map(self._keep, queues), default=self.seconds / 3)

    def _keep(self, queue: str) -> float:
        try:
            return self._whole.keep(queue)
        except UNREACHABLE as error:  # of which the consumer tells once
            logger.info("Cannot renew the lease on queue %r now: %s", queue, error)
            return min(1.0, self.seconds / 10)
