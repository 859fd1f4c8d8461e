"""The state that the parts of a consumer share. On one server a consumer has one part."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from ..connection.native import get_logger
from ..connection.options import Options
from ..errors import UNREACHABLE
from ..store.calls import instrumentation
from ..store.store import Store
from .lease.lease import Lease
from .lease.standstill import Progress
from .policy.decisions import Rules
from .unacked import QoS

logger = get_logger(__name__)


class AnyPart(Protocol):
    """Reactions of all parts to an event of one of them."""

    def forget(self) -> None:
        """Forget the claimed messages, because they belong to other consumers now."""

    def step_aside(self) -> None:
        """Let other consumers claim while this thread is busy."""


class Session:
    """The lease, the tags, the prefetch limit and the program of one consumer."""

    progress: Progress

    def __init__(
        self,
        store: Store,
        options: Options,
        qos: QoS,
        cycle: Any,
        hand_over: Callable[[dict[str, Any], str], None],
        lease: Lease | None = None,
        rules: Rules | None = None,
        patience_seconds: float | None = None,
        broker: Hashable = None,
    ) -> None:
        self.store = store
        self.options = options
        self.qos = qos
        self.cycle = cycle
        self.hand_over = hand_over
        self.lease = lease or Lease(store, options.lease_seconds)
        self.rules = rules
        #: Identifies the broker, whichever server has its data now.
        self.broker = broker
        #: How long to retry a lost connection before Kombu is told.
        self.patience_seconds = (
            options.reconnect_seconds if patience_seconds is None else patience_seconds
        )
        self.parts: Sequence[AnyPart] = ()
        self.tag = 0
        #: How many parts with something to claim have not had their turn yet.
        self.wanting = 1
        #: How many messages other parts have claimed and not handed out.
        self.elsewhere = 0
        #: How many queues other parts have.
        self.turns_elsewhere = 0
        self.quick_runs = 0
        #: Whether tasks end before `hand_over` returns, or may do so: the next one may take long.
        self.runs_here = False
        #: Whether an event loop polls for answers, so that a claim need not block for its answer.
        self.is_polled = False
        #: Queue -> when it was resumed, if it was paused within the last day.
        self.resumed_ms: dict[str, int] = {}

    def mind_blocking(self) -> None:
        """Let others keep this consumer's promises in case the next task blocks this thread."""
        self.qos.outbox.settle(self.store, self.lease)  # nobody would notice a refused ack
        for part in tuple(self.parts):
            part.step_aside()

    def start_anew(self) -> None:
        """Go on as a new consumer, because others have its messages. The caller tells Kombu."""
        logger.warning(
            "The lease of consumer %s has expired, and others get its messages: it starts again",
            self.lease.consumer,
        )
        if (meter := instrumentation.current) is not None:
            meter.lease_lost()
        self.lease.end()
        self.progress.forget()
        self.lease = self.lease.successor()
        for part in tuple(self.parts):
            part.forget()
        self.qos.forget()

    def leave(self, queues: set[str]) -> dict[str, BaseException]:
        """Give back what is not acked and not running; returns errors by queue."""
        slots = self.qos.slots
        slots.shared.leave_with(slots.of_tasks)  # even if the broker is away
        self.qos.release_failed()
        self.qos.outbox.settle(self.store, self.lease)  # leaving gives back what is not acked yet
        slots.shared.report(self.store, self.lease.consumer, self.lease.ms)
        errors = self.store.leases.leave_all([*queues], self.lease.consumer, slots.running)
        with suppress(*UNREACHABLE):  # there may be no consumer to do this later
            self.store.dictionaries.tidy([*queues], at_once=True)
        return errors
