"""Outages of servers that have no proxy in front of them."""

from __future__ import annotations

from tests.crash.clock_faults import ClockFaults
from tests.crash.pool_faults import PoolFaults
from tests.crash.worker_faults import WorkerFaults
from tests.kit.servers import Server


class PausingFaults(WorkerFaults, PoolFaults, ClockFaults):
    """Nobody reaches a master that closes all connections and then answers nobody."""

    @property
    def paused(self) -> list[Server]:
        """The masters."""
        return self.servers

    def _can_pause(self) -> bool:
        return True

    def _before_pause(self) -> None:
        """Keep others from taking the master for dead."""

    def _after_pause(self) -> None:
        """Let them again."""

    def finish(self) -> None:
        if self._is_on("outage"):
            self._end_pause()
        super().finish()

    def _can_cut(self) -> bool:
        return not self._is_on("clock minute", "clock hour") and self._can_pause()

    def _cut_all(self, seconds: float) -> None:
        self._before_pause()
        for server in self.paused:
            self._pause_one(server, seconds)
        self._lasts("outage", seconds, self._after_pause)

    def _pause_one(self, server: Server, seconds: float) -> None:
        with server.client(password=self.password, socket_timeout=5) as client:
            pipe = client.pipeline(transaction=False)
            pipe.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            pipe.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            pipe.execute_command("CLIENT", "PAUSE", str(round(seconds * 1000)), "ALL")
            pipe.execute()

    def _end_pause(self) -> None:
        for server in self.paused:
            with server.client(password=self.password) as client:
                client.execute_command("CLIENT", "UNPAUSE")
        self._after_pause()

    def _clock(self, kind: str, seconds: float) -> str | None:
        # A server that pauses does not tell its time.
        return None if self._is_on("outage") else super()._clock(kind, seconds)
