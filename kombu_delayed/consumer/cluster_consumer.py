"""A consumer of queues on several nodes of a Cluster: one that is down stops its own queues."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import suppress
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from ..connection.cluster.connection import SlotMoves
from ..connection.cluster.nodes import NOWHERE, Node
from ..connection.native import get_logger
from ..errors import UNREACHABLE, NodeDown
from .consumer import ACK_RETRY_SECONDS, QUICK_RUNS, Consumer
from .lease.lease import Lease
from .outliving_tasks import remain
from .sources import Source
from .standstill import Progress, Unbegun

if TYPE_CHECKING:
    from ..connection.options import Options
    from ..connection.wakeup import WakeConnection
    from ..store.cluster_store import ClusterStore
    from .policy.decisions import Rules
    from .unacked import QoS

logger = get_logger(__name__)

#: A queue that is on its way to another node is asked again after so long.
MOVING_SECONDS = 0.05


class ClusterConsumer(Consumer):
    """One part for each node that has queues of it. They share name, prefetch limit and acks."""

    def __init__(
        self,
        store: ClusterStore,
        options: Options,
        qos: QoS,
        new_wake: Callable[[Node], WakeConnection],
        cycle: Any,
        hand_over: Callable[[dict[str, Any], str], None],
        lease: Lease,
        rules: Rules | None = None,
    ) -> None:
        self.store: ClusterStore = store
        self.options = options
        self.lease = lease
        self.patience_seconds = options.reconnect_seconds
        self.qos, self.cycle, self.hand_over_to = qos, cycle, hand_over
        self.rules = rules
        self.tag = 0
        self.quick_runs = 0
        #: How many parts have something to claim that have not had their turn.
        self.wanting = 1
        self._new_wake = new_wake
        self._parts: dict[Node, Part] = {}
        self._followed: int | None = None
        self._turn = 0
        self.progress = self._new_progress()

    def take_back(self) -> list[Unbegun]:
        """Take what was claimed and not begun away from all parts. From any thread."""
        return [each for part in self.parts for each in part.take_back()]

    @property
    def parts(self) -> list[Part]:
        """One for each node."""
        return list(self._parts.values())

    @property
    def sources(self) -> dict[str, Source]:  # type: ignore[override]
        """Those of all parts."""
        return ChainMap(*(part.sources for part in self.parts))  # type: ignore[return-value]

    def _part(self, queue: str) -> Part:
        for part in self.parts:
            if queue in part.sources:
                return part
        try:
            return self._part_on(self.store.node_of(queue))
        except NodeDown:
            return self._part_on(NOWHERE)

    def _part_on(self, node: Node) -> Part:
        if node not in self._parts:
            self._parts[node] = Part(self, node, self._new_wake(node))
        return self._parts[node]

    def _in_turn(self) -> list[Part]:
        """The parts, another one in front each time."""
        parts = self.parts
        self._turn += 1
        at = self._turn % max(len(parts), 1)
        return parts[at:] + parts[:at]

    # What a consumer does.

    def add(self, queue: str, no_ack: bool, expires_ms: int) -> None:
        """Consume a queue from now on."""
        self._part(queue).add(queue, no_ack, expires_ms)

    def remove(self, queue: str) -> None:
        """Consume a queue no more: what was claimed and not handed out, or not begun, goes back."""
        self._part(queue).remove(queue)

    def close(self) -> None:
        """Stop: whatever is still unacked is for other consumers now. Twice is safe."""
        queues = {*self.sources, *self.lease.queues}
        self.lease.end()
        for part in self.parts:
            part.stop()
        self._parts.clear()
        for queue in filter(self.qos.slots.running, queues):
            self.qos.give_back_reserved(queue)  # what has begun goes on
        self.qos.release_failed()
        self.qos.outbox.settle(self.store, self.lease)
        errors = self.store.leases.leave_all([*queues], self.lease.consumer, self.qos.slots.running)
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
        self.remaining = remain(self.lease, queues, self.qos.slots) or self.remaining

    def step(self) -> float:
        """Do what is due on all nodes; returns when to come back, by the monotonic clock."""
        self.progress.stamp()
        self._follow()
        now, parts = monotonic(), self._in_turn()
        self._look(now)
        next_at = math.inf
        for n, part in enumerate(parts):
            self.wanting = sum(each.wants(now) for each in parts[n:])
            next_at = min(next_at, part.step())
        self._give_up_on_all()
        if self.qos.outbox.has_any:
            next_at = min(next_at, monotonic() + ACK_RETRY_SECONDS)
        return min(next_at, self._look_at)

    def _follow(self) -> None:
        """Queues whose slot has another node now."""
        generation = self.store.cluster.generation
        if generation == self._followed:
            return
        self._followed = generation
        for part in self.parts:
            for queue in part.queues:
                try:
                    node = self.store.node_of(queue)
                except NodeDown:
                    continue
                if node != part.node:
                    part.move(queue, self._part_on(node))
            if not part.queues:
                part.stop()
                del self._parts[part.node]

    def _give_up_on_all(self) -> None:
        """A Cluster of which no node answers is a lost broker, of which Kombu has to hear."""
        errors = [part.given_up for part in self.parts]
        if errors and all(errors):
            raise errors[0]  # type: ignore[misc]

    @property
    def idle(self) -> bool:
        """Whether it neither claims nor waits, as it had no room when it could have."""
        return any(part.idle for part in self.parts)

    @property
    def wakes(self) -> list[WakeConnection]:
        """What its parts wait on."""
        return [part.wake for part in self.parts]

    def take_token(self, connection: Any = None) -> None:
        """Read the wake tokens that have come over one of the connections."""
        for part in self.parts:
            if part.wake.connection is connection:
                part.take_token()

    @property
    def has_messages(self) -> bool:
        """Whether claimed messages can be handed out."""
        return any(part.has_messages for part in self.parts)

    def hand_out(self) -> bool:
        """Give one claimed message to its consumer; returns whether there was one."""
        return any(part.hand_out() for part in self._in_turn())

    def get(self, queue: str, no_ack: bool) -> tuple[dict[str, Any], bytes] | None:
        """Claim one message of a queue without waiting, with its record; None: there is none."""
        self._follow()
        return self._part(queue).get(queue, no_ack)

    def refuse(self, queue: str, tag: int, record: bytes, error: Exception, no_ack: bool) -> None:
        """Bury a message whose body cannot be read, or which is none for its consumer."""
        self._part(queue).refuse(queue, tag, record, error, no_ack)

    # What its parts have in common.

    @property
    def claimed(self) -> int:
        """How many messages were claimed and not handed out."""
        return sum(part.claimed for part in self.parts)

    def start_anew(self) -> None:
        """Its lease has ended on one node: nothing that it held counts as its own any more."""
        for part in self.parts:
            part.drop()

    def mind_blocking(self) -> None:
        """If tasks run in this very thread, others have to keep its promises meanwhile."""
        if self.quick_runs >= QUICK_RUNS:
            return
        self.qos.outbox.settle(self.store, self.lease)  # nobody would hear of an ack's refusal
        for part in self.parts:
            if part.wake.waiting:
                part.step_aside()


class Part(Consumer):
    """What a consumer has to do with one node."""

    def __init__(self, whole: ClusterConsumer, node: Node, wake: WakeConnection) -> None:
        self._whole = whole
        self.node = node
        #: The last error, where the node has been down for longer than anybody waits.
        self.given_up: BaseException | None = None
        super().__init__(
            whole.store,
            whole.options,
            whole.qos,
            wake,
            whole.cycle,
            whole.hand_over_to,
            whole.lease,
            whole.rules,
        )
        self.patience_seconds = math.inf

    @property
    def lease(self) -> Lease:
        """That of the whole consumer."""
        return self._whole.lease

    @lease.setter
    def lease(self, lease: Lease) -> None:
        self._whole.lease = lease

    def _new_progress(self) -> Progress:
        return self._whole.progress

    @property
    def _tag(self) -> int:
        return self._whole.tag

    @_tag.setter
    def _tag(self, tag: int) -> None:
        self._whole.tag = max(self._whole.tag, tag)

    @property
    def _quick_runs(self) -> int:
        return self._whole.quick_runs

    @_quick_runs.setter
    def _quick_runs(self, runs: int) -> None:
        self._whole.quick_runs = runs

    @property
    def claimed(self) -> int:
        """How many messages were claimed here and not handed out."""
        return len(self._buffer)

    def wants(self, now: float) -> bool:
        """Whether there may be something to claim."""
        return now >= self._try_again_at and self._agenda.wants(now)

    @property
    def _look_at(self) -> float:
        return math.inf  # the whole consumer looks at all nodes

    @property
    def queues(self) -> frozenset[str]:
        """Those that it consumes, and those of which an answer was lost."""
        return frozenset(self.sources) | self._unsure.keys()

    def move(self, queue: str, other: Part) -> None:
        """Another node has this queue now."""
        logger.info("Queue %r is on node %s now", queue, other.node)
        if source := self.let_go(queue):
            other.take_over(source)
            source.claim_anew()
        other._buffer.extend(self._taken_out_of(queue))
        if queue in self._unsure:
            other._unsure[queue] = self._unsure.pop(queue)

    def stop(self) -> None:
        """Claim and wait no more."""
        self.drop_all()
        self.wake.close()
        self._buffer.clear()

    def drop(self) -> None:
        """What was claimed belongs to others."""
        self._buffer.clear()
        self._unsure.clear()
        self._stop_waiting()

    def step_aside(self) -> None:
        """Have others claim, for as long as this thread is busy."""
        self._stop_waiting()
        try:
            self.announce_all()
        except UNREACHABLE as error:
            logger.info("Other consumers look by themselves: %s", error)

    def _step(self, now: float) -> None:
        if self.wake.check(now):
            self._stop_waiting()
        # First: who has claimed all there was is told of what comes afterwards.
        self.wake.start(self.sources)
        self._hear()
        super()._step(now)

    def take_token(self, connection: Any = None) -> None:
        """Read the wake tokens that have come."""
        try:
            self._hear(told=True)
        except UNREACHABLE as error:
            self._broken(error)

    def _hear(self, told: bool = False) -> None:
        for queue, _ in self._tokens(told):
            if queue in self.sources:
                # Whatever time it is for: only a claim has the next token sent to this consumer.
                self.sources[queue].token(0, monotonic())
            else:
                self._announce(queue)

    def _server_ms(self) -> float:
        # A part that was just made has messages from where their queue was, and asked nobody yet.
        found = super()._server_ms()
        return found if math.isfinite(found) else time() * 1000

    def _tokens(self, told: bool) -> Iterator[tuple[str, int]]:
        yield from self.wake.heard(told)  # type: ignore[attr-defined]

    def _listens(self, queue: str) -> bool:
        return bool(self.wake.listens(queue))  # type: ignore[attr-defined]

    @property
    def _turns(self) -> int:
        return sum(len(part.sources) for part in self._whole.parts)

    def _room(self) -> int:
        elsewhere = self._whole.claimed - len(self._buffer)
        return max(super()._room() - elsewhere, 0)

    def _worth_claiming(self, room: int, now: float) -> int:
        return -(-super()._worth_claiming(room, now) // max(self._whole.wanting, 1))

    def _claim(self, source: Source, want: int, now: float) -> int:
        try:
            return super()._claim(source, want, now)
        except SlotMoves as error:
            self._moves(source, error, now)
            return 0

    def _moves(self, source: Source, error: BaseException, now: float) -> bool:
        if not isinstance(error, SlotMoves):
            return False
        self._unsure.pop(source.queue, None)  # nothing was done
        source.ready, source.owes, source.due_at = False, False, now + MOVING_SECONDS
        source.poll_at = source.due_at
        return True

    def _pass_on(self) -> None:
        with suppress(SlotMoves):  # then somebody else finds out
            super()._pass_on()

    def _mind_blocking(self) -> None:
        self._whole.mind_blocking()

    def _start_anew(self) -> None:
        super()._start_anew()
        self._whole.start_anew()

    def _broken(self, error: BaseException) -> float:
        at = super()._broken(error)
        since = self._broken_since
        if since is None or monotonic() - since < self._whole.patience_seconds:
            return at
        if self.given_up is None:
            logger.error(
                "%s of the Cluster has been down for %.0f seconds: nothing is consumed from "
                "%s until it is back or a replica takes over; other queues go on. %s",
                "A node" if self.node == NOWHERE else f"Node {self.node}",
                monotonic() - since,
                ", ".join(map(repr, sorted(self.sources))),
                error,
            )
        self.given_up = error
        return at

    def _mended(self) -> None:
        self.given_up = None
        super()._mended()
