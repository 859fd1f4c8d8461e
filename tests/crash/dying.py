"""Processes that die at a chosen command: an abandoned connection stands in for each."""

from __future__ import annotations

import math
import select
from collections import deque
from collections.abc import Callable
from typing import Any

import redis
from kombu.utils.scheduling import round_robin_cycle

from kombu_delayed.connection.commands import Replicas, pack
from kombu_delayed.connection.connection import ServerConnection
from kombu_delayed.connection.options import Options
from kombu_delayed.consumer.consumer import Consumer
from kombu_delayed.consumer.session import Session
from kombu_delayed.consumer.unacked import QoS
from kombu_delayed.store.store import Store

#: Where a process dies: after sending a command but before reading its answer, or after both.
UNREAD, ANSWERED = "answer unread", "answered"
CUTS = (UNREAD, ANSWERED)

ANSWER_SECONDS = 10


class Killed(BaseException):
    """The process is gone: nothing of it runs any more."""


class DyingConnection(ServerConnection):
    """Sends commands as usual, until the one at which its process dies."""

    def __init__(self, pool: redis.ConnectionPool, at: float, cut: str) -> None:
        super().__init__(pool)
        self.sent = 0
        self._at = at
        self._cut = cut

    def __call__(self, *command: Any, replicas: Replicas | None = None) -> Any:
        self._die_unread(command)
        try:
            return super().__call__(*command, replicas=replicas)
        finally:
            self._die_answered()

    def post(self, *command: Any, on_error: Callable[[], None], **more: Any) -> None:
        self._die_unread(command)
        super().post(*command, on_error=on_error, **more)
        self._die_answered()

    def _die_unread(self, command: tuple[Any, ...]) -> None:
        self.sent += 1
        if self.sent > self._at:
            raise Killed
        if self.sent == self._at and self._cut == UNREAD:
            self._send(pack(command))
            self._await_answers()
            raise Killed

    def _die_answered(self) -> None:
        if self.sent == self._at:
            self._send_unsent()
            self._await_answers()
            raise Killed

    def _await_answers(self) -> None:
        """The server carries out the commands that were sent; their answers are not read."""
        if self._unread or self._cut == UNREAD:
            assert select.select([self._connection._sock], [], [], ANSWER_SECONDS)[0]


def dying_store(client: redis.Redis, now: int, at: float = math.inf, cut: str = UNREAD) -> Store:
    """A store whose process dies at its `at`-th command."""
    store = Store(client, now=str(now))
    store.run = DyingConnection(client.connection_pool, at, cut)
    return store


class NoWake:
    """Does not wake anyone: a test moves the clock and knows when to come back."""

    overdue_at = math.inf
    waiting = False
    connection = None

    def start(self, queues: Any) -> None:
        pass

    def listens(self, queue: str) -> bool:
        return False

    def check(self, now: float) -> None:
        pass

    reset = close = lambda self: None


class StubChannel:
    do_restore = False
    ack_emulation = True

    def on_done(self) -> None:
        pass


class Reader:
    """A consumer of queue `q`, run by calls; its deliveries are in `got`.

    One that `polls`, as an event loop does, does other things while a claim is on its way.
    """

    def __init__(self, store: Store, prefetch_count: int = 100, polls: bool = False) -> None:
        self.got: deque[dict[str, Any]] = deque()
        self.qos = QoS(StubChannel(), prefetch_count)
        cycle = round_robin_cycle()
        cycle.update(["q"])
        session = Session(
            store, Options(), self.qos, cycle, lambda payload, _: self.got.append(payload)
        )
        session.is_polled = polls
        self.consumer = Consumer(session, NoWake())
        self.consumer.add("q", False, 0)

    def read(self) -> None:
        """Claim and take all messages."""
        for source in self.consumer.sources.values():
            source.ready = True
        self.consumer.step()
        self.land()
        self.take_in()

    def land(self) -> None:
        """Wait for the answer to a claim that is pending, as an event loop does."""
        (part,) = self.consumer.parts
        for _ in range(100):
            if not part.claims.pending:
                return
            sock = part.session.store.run._sock
            if not part.claims.pending[0].has_ended and sock is not None:
                assert select.select([sock], [], [], ANSWER_SECONDS)[0]
            part.take_answers()
            self.consumer.step()
        raise AssertionError("a claim is pending for ever")

    def take_in(self) -> None:
        """Take the claimed messages."""
        while self.consumer.hand_out():
            self.qos.append(None, self.got[-1]["properties"]["delivery_tag"])

    def take(self) -> int:
        """The tag of the next message."""
        return int(self.got.popleft()["properties"]["delivery_tag"])
