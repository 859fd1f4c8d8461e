"""Acks and rejects to the nodes of a Cluster: those for a node that is down hold up no others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

from ..connection.native import get_logger
from ..errors import UNREACHABLE
from ..store.store import Store
from .lease.lease import Lease
from .unacked import QoS

logger = get_logger(__name__)

T = TypeVar("T")


class ClusterQoS(QoS):
    """As `QoS`; what cannot be told to one node is kept, in its order, for the next time."""

    def _flush_done(self, store: Store, lease: Lease) -> None:
        _flush_past(self._done, lambda done: done.queue, lambda: self._flush_batch(store, lease))

    def _flush_slots(self, store: Store, lease: Lease) -> None:
        _flush_past(self._freed, lambda freed: freed[0], lambda: self._flush_freed(store, lease))


def _flush_past(waiting: deque[T], queue_of: Callable[[T], str], flush: Callable[[], None]) -> None:
    """Tell of the first ones again and again; keep those of queues whose node is down."""
    kept: deque[T] = deque()
    down: set[str] = set()
    try:
        while waiting:
            queue = queue_of(waiting[0])
            if queue in down:
                kept.append(waiting.popleft())
                continue
            try:
                flush()
            except UNREACHABLE as error:
                logger.info("Cannot tell of what was done in queue %r now: %s", queue, error)
                down.add(queue)
    finally:
        waiting.extendleft(reversed(kept))
