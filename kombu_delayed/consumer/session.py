"""What the parts of a consumer have in common. On one server a consumer has one part."""

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
    """What concerns all parts when it happens to one of them."""

    def forget(self) -> None:
        """What was claimed belongs to others."""

    def step_aside(self) -> None:
        """Have others claim, for as long as this thread is busy."""


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
        #: Which broker it is, whatever server has its data now.
        self.broker = broker
        #: How long a lost connection is mended before Kombu is told.
        self.patience_seconds = (
            options.reconnect_seconds if patience_seconds is None else patience_seconds
        )
        self.parts: Sequence[AnyPart] = ()
        self.tag = 0
        #: How many parts have something to claim that have not had their turn.
        self.wanting = 1
        #: How many messages were claimed by other parts and not handed out …
        self.elsewhere = 0
        #: … and how many queues these have.
        self.turns_elsewhere = 0
        self.quick_runs = 0
        #: Whether tasks end before `hand_over` returns, or may: the next one may take for long.
        self.runs_here = False
        #: Whether an event loop polls for answers: a claim need not wait for its own.
        self.is_polled = False
        #: Queue -> since when it goes on, of those that were paused within the last day.
        self.resumed_ms: dict[str, int] = {}

    def mind_blocking(self) -> None:
        """If tasks run in this very thread, others have to keep its promises meanwhile."""
        self.qos.outbox.settle(self.store, self.lease)  # nobody would hear of an ack's refusal
        for part in tuple(self.parts):
            part.step_aside()

    def start_anew(self) -> None:
        """Others have what this consumer held: it goes on as a new one, and lets Kombu know."""
        logger.warning(
            "The lease of consumer %s has expired, and others get its messages: it starts again",
            self.lease.consumer,
        )
        if (told := instrumentation.current) is not None:
            told.lease_lost()
        self.lease.end()
        self.progress.forget()
        self.lease = self.lease.successor()
        for part in tuple(self.parts):
            part.forget()
        self.qos.forget()

    def leave(self, queues: set[str]) -> dict[str, BaseException]:
        """Give back what is not acked and not running; returns the errors of queues."""
        slots = self.qos.slots
        slots.shared.leave_with(slots.of_tasks)  # also if the broker is away
        self.qos.release_failed()
        self.qos.outbox.settle(self.store, self.lease)  # leaving gives back what is not acked yet
        slots.shared.tell(self.store, self.lease.consumer, self.lease.ms)
        errors = self.store.leases.leave_all([*queues], self.lease.consumer, slots.running)
        with suppress(*UNREACHABLE):  # nobody may come who looks after them later
            self.store.dictionaries.tidy([*queues], at_once=True)
        return errors
