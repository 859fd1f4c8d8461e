"""A queue with many messages, whose slot moves from one node of a Cluster to another."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone

import redis
from celery import Celery
from redis.exceptions import RedisError

from celery_ext.control.delayed import Delayed
from tests.kit.clusters import Cluster
from tests.kit.servers import Server

QUEUE = "bulk"
PAYLOAD_BYTES = 300
PROBE_SECONDS = 0.005


@dataclass
class Reshard:
    """Its messages are due in a month, one in each millisecond.

    `stalls_ms`: the longest wait for a node in each move.
    """

    app: Celery
    cluster: Cluster
    messages: int
    stalls_ms: list[float] = field(default_factory=list)
    #: Moves that the servers gave up and that had to be finished.
    failed: int = 0

    key = f"{{{QUEUE}}}"

    def fill(self) -> None:
        task, first = self.app.tasks["run_early"], datetime.now(timezone.utc) + timedelta(days=30)
        arguments = {"text": "x" * PAYLOAD_BYTES}
        etas = (first + timedelta(milliseconds=n) for n in range(self.messages))
        rows = ((task, (), arguments, eta, {"queue": QUEUE}) for eta in etas)
        Delayed(self.app).schedule_many(rows, progress=False)

    def empty(self) -> int:
        """Drop the messages; returns how many were there."""
        with self.app.connection() as connection:
            return int(connection.default_channel.queue_purge(QUEUE))

    def move(self, key: str, target: Server) -> None:
        """Raises the servers' error if they give up the move; the caller must finish it."""
        with self._probed():
            try:
                self.cluster.move(key, target)
            except (RedisError, OSError, AssertionError):
                self.failed += 1
                raise

    @contextlib.contextmanager
    def _probed(self) -> Iterator[None]:
        over, waits = threading.Event(), [0.0]
        probes = [
            threading.Thread(target=_probe, args=(self.cluster.client(master), over, waits))
            for master in self.cluster.masters()
        ]
        for probe in probes:
            probe.start()
        try:
            yield
        finally:
            over.set()
            for probe in probes:
                probe.join()
            self.stalls_ms.append(max(waits) * 1000)


def _probe(client: redis.Redis, over: threading.Event, waits: list[float]) -> None:
    """Measures repeatedly how long a node takes to answer."""
    with client:
        while not over.wait(PROBE_SECONDS):
            began = time.monotonic()
            with contextlib.suppress(RedisError):
                client.ping()
            waits.append(time.monotonic() - began)
