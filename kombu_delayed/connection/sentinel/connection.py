"""Connections to the current master, never to one that is being or has been replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from redis import ConnectionPool

from kombu_delayed.errors import ServerNotReady

from ..commands import Replicas, ignore, pack, read
from ..connection import ServerConnection
from ..format import Format
from ..wakeup import WakeConnection
from .watch import MasterChanges, MasterWatch


class SentinelConnection(ServerConnection):
    """A `ServerConnection` that waits with its commands while a failover is under way."""

    def __init__(
        self, pool: ConnectionPool, watch: MasterWatch, format: Format | None = None
    ) -> None:
        self._watch = watch
        super().__init__(pool, format)

    def _start(self) -> None:
        super()._start()
        #: The generation whose master has been found to have enough replicas.
        self._replicated_over = -1

    def __call__(self, *command: Any, replicas: Replicas | None = None) -> Any:
        """Like `ServerConnection`, but to the next master if the current one is being replaced."""
        self._watch.wait()
        return super().__call__(*command, replicas=replicas)

    def many(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Like `ServerConnection`, but to the next master if the current one is being replaced."""
        self._watch.wait()
        return super().many(commands)

    def post(
        self,
        *command: Any,
        on_error: Callable[[], None],
        on_answer: Callable[[Any], None] = ignore,
    ) -> None:
        """Like `ServerConnection`. Raises MasterChanges while the master is being replaced."""
        if self._watch.is_held:
            raise MasterChanges("the Sentinels are about to name another master")
        super().post(*command, on_error=on_error, on_answer=on_answer)

    def _open(self, replicas: Replicas | None = None) -> None:
        if self._connection is not None and self._connection.has_left:
            self._fail_posted()
        super()._open(replicas)
        if replicas is not None and self._replicated_over != self.generation:
            self._await_replicas(replicas)

    def _await_replicas(self, replicas: Replicas) -> None:
        """Wait for replicas: a new master has none at first.

        Storing nothing is better than storing a message that may be sent again.
        """
        self._read_posted()
        super()._send(pack(replicas.command))
        found = read(self._connection)
        if found < replicas.count:
            raise ServerNotReady(
                f"the master has {found} of {replicas.count} replicas after "
                f"{replicas.timeout_ms / 1000:g} s (delayed_replicas_to_wait); nothing was stored"
            )
        self._replicated_over = self.generation

    def connect(self) -> Any:
        """Take another connection, to the next master if the current one is being replaced."""
        self._watch.wait()
        return super().connect()

    def refresh(self, connection: Any, is_idle: bool) -> None:
        """Move it to the current master. Raises MasterChanges if that would lose answers."""
        self._watch.wait()
        if connection.has_left and not is_idle:
            raise MasterChanges("the Sentinels name another master")
        connection.move()


class MasterWake(WakeConnection):
    """Waits for tokens of the current master, never of a former one."""

    watch: MasterWatch

    def check(self, now: float) -> bool:
        """Like any. Raises MasterChanges if it has left the master or a failover is under way."""
        if self.watch.is_held:
            raise MasterChanges("the Sentinels are about to name another master")
        if self.connection is not None and self.connection.has_left:
            raise MasterChanges("the Sentinels name another master")
        return super().check(now)
