"""A consumer of queues on several nodes of a Cluster: one that is down stops its own queues."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count
from operator import attrgetter
from time import monotonic
from typing import TYPE_CHECKING, Any

from ..connection.cluster.nodes import NOWHERE, Node
from ..connection.native import get_logger
from ..errors import UNREACHABLE, NodeDown
from .claiming.sources import Source
from .consumer import Consumer
from .part import Part
from .retrying import ACK_RETRY_SECONDS

if TYPE_CHECKING:
    from ..connection.cluster.wakeup import NodeWake
    from .session import Session

logger = get_logger(__name__)


class NodePart(Part):
    """A part for one node of the Cluster, which sends it its tokens."""

    wake: NodeWake

    def __init__(self, session: Session, node: Node, wake: NodeWake) -> None:
        super().__init__(session, wake)
        self.node = node
        #: Rises with each message that a part hands out.
        self.turn = 0
        #: The last error, if the node has been down for longer than the session's patience.
        self.given_up: BaseException | None = None
        self.patience_seconds = math.inf

    def wants(self, now: float) -> bool:
        """Whether there may be something to claim."""
        return now >= self.retry.next_at and self.claims.agenda.wants(now)

    @property
    def queues(self) -> frozenset[str]:
        """The queues that it consumes, and those with a lost answer."""
        return frozenset(self.claims.sources) | self.claims.unsure.keys()

    def _known_queues(self) -> frozenset[str]:
        parts: Sequence[Any] = self.session.parts
        return super()._known_queues().difference(*(p.queues for p in parts if p is not self))

    def move(self, queue: str, other: NodePart) -> None:
        """Move a queue to the part of the node that has it now."""
        logger.info("Queue %r is on node %s now", queue, other.node)
        mine, its = self.claims, other.claims
        if source := mine.let_go(queue):
            its.take_over(source)
            source.claim_anew()
        its.buffer.extend(mine.buffer.take_out_of(queue))
        if queue in mine.unsure:
            its.unsure[queue] = mine.unsure.pop(queue)

    def step_aside(self) -> None:
        """As any part, but a node that is down does not hinder the other parts."""
        try:
            super().step_aside()
        except UNREACHABLE as error:
            logger.info("Other consumers will only notice by polling: %s", error)

    def _step(self, now: float) -> None:
        if self.wake.check(now):
            self._stop_waiting()
        # Before the claim: a consumer that has claimed everything is told what comes afterwards.
        self.wake.start(self.claims.listened)
        self._hear()
        super()._step(now)

    def take_token(self) -> bool:
        """Read the wake tokens that have come, of which there may be several. Returns False."""
        try:
            self._hear(polled=True)
        except UNREACHABLE as error:
            self._broken(error)
        return False

    def _hear(self, polled: bool = False) -> None:
        for queue, _ in self.wake.heard(polled):
            if queue in self.claims.sources:
                # Claim now, even before its time: the next token is sent only after a claim.
                self.claims.sources[queue].token(0, monotonic())
            else:
                self._announce(queue)

    def _broken(self, error: BaseException) -> float:
        at, since = super()._broken(error), self.retry.broken_since
        if since is None or monotonic() - since < self.session.patience_seconds:
            return at
        if self.given_up is None:
            logger.error(
                "%s of the Cluster has been down for %.0f seconds: nothing is consumed from "
                "%s until it is back or a replica takes over; other queues keep working. %s",
                "A node" if self.node == NOWHERE else f"Node {self.node}",
                monotonic() - since,
                ", ".join(map(repr, sorted(self.claims.sources))),
                error,
            )
        self.given_up = error
        return at

    def _mended(self) -> None:
        self.given_up = None
        super()._mended()


class ClusterConsumer(Consumer):
    """A consumer with a part for each node that has queues of it."""

    parts: list[NodePart]  # type: ignore[assignment]

    def __init__(self, session: Session, new_wake: Callable[[Node], NodeWake]) -> None:
        super().__init__(session)
        self._new_wake = new_wake
        self._followed: int | None = None
        self._turns = count(1)

    @property
    def sources(self) -> Mapping[str, Source]:
        """The sources of all parts."""
        return ChainMap(*(part.claims.sources for part in tuple(self.parts)))

    def _part(self, queue: str) -> NodePart:
        for part in tuple(self.parts):
            if queue in part.claims.sources:
                return part
        try:
            return self._part_on(self.store.node_of(queue))
        except NodeDown:
            return self._part_on(NOWHERE)

    def _part_on(self, node: Node) -> NodePart:
        for part in tuple(self.parts):
            if part.node == node:
                return part
        part = NodePart(self.session, node, self._new_wake(node))
        self.parts.append(part)
        return part

    def _in_turn(self) -> list[NodePart]:
        """The parts, first the one that has not handed out a message for the longest time."""
        return sorted(self.parts, key=attrgetter("turn"))

    def _leave(self, queues: set[str]) -> Collection[str]:
        self.parts.clear()
        errors = self.session.leave(queues)
        for queue, error in errors.items():
            if not isinstance(error, UNREACHABLE):
                raise error
            logger.warning(
                "Consumer %s stops without the node of queue %r (%s): its unacknowledged "
                "messages return to the queue when the node is back",
                self.lease.consumer,
                queue,
                error,
            )
        return errors

    def step(self) -> float:
        """Do what is due on all nodes; returns when to come back, by the monotonic clock."""
        self._follow()
        next_at = super().step()
        self._give_up_on_all()
        if self.session.qos.outbox.has_any:
            next_at = min(next_at, monotonic() + ACK_RETRY_SECONDS)
        return next_at

    def _step_parts(self) -> float:
        session, now, next_at = self.session, monotonic(), math.inf
        parts = self._in_turn()
        for n, part in enumerate(parts):
            session.wanting = sum(each.wants(now) for each in parts[n:])
            others = [each.claims for each in parts if each is not part]
            session.elsewhere = sum(len(each.buffer) for each in others)
            session.turns_elsewhere = sum(len(each.sources) for each in others)
            next_at = min(next_at, part.step())
        return next_at

    def _follow(self) -> None:
        """Move queues whose slot is on another node now to the part of that node."""
        generation = self.store.cluster.generation
        if generation == self._followed:
            return
        self._followed = generation
        for part in tuple(self.parts):
            for queue in part.queues:
                try:
                    node = self.store.node_of(queue)
                except NodeDown:
                    continue
                if node != part.node:
                    part.move(queue, self._part_on(node))
            if not part.queues:
                part.stop()
                self.parts.remove(part)

    def _give_up_on_all(self) -> None:
        """Raise an error if no node answers, so that Kombu knows that the broker is lost."""
        errors = [part.given_up for part in self.parts]
        if errors and all(errors):
            raise errors[0]  # type: ignore[misc]

    def hand_out(self) -> bool:
        """Give one claimed message to its consumer; returns whether there was one."""
        for part in self._in_turn():
            if part.hand_out():
                part.turn = next(self._turns)
                return True
        return False

    def get(
        self, queue: str, no_ack: bool, expires_ms: int = 0
    ) -> tuple[dict[str, Any], bytes] | None:
        """Claim one message without waiting; returns it with its record, or None."""
        self._follow()
        return super().get(queue, no_ack, expires_ms)
