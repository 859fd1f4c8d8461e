"""Faults of the server and of the way to it."""

from __future__ import annotations

import time

from tests.crash.faults import AGAIN_SECONDS, Faults

#: So many leases an outage lasts, at least and at most.
OUTAGE_LEASES = 1.5, 3.0
#: Tasks that are to run while nobody reaches the server are sent so long before.
AHEAD_SECONDS = 1.0
RUNNING = 6


class NetworkFaults(Faults):
    """What strikes one server with proxies in front of it."""

    def finish(self) -> None:
        super().finish()
        if self.field.network is not None:
            self.field.network.resume()
            for slot in range(len(self.crew.slots)):
                self.field.network.connect_again(slot)
            self.field.network.heal()

    def _server_kill(self) -> str:
        self.field.server.kill()
        time.sleep(self.rng.uniform(0, 0.8))
        self.field.server.start()
        return "server"

    def _clients_killed(self) -> str:
        return self._command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    def _script_flush(self) -> str:
        return self._command("SCRIPT", "FLUSH")

    def _server_sleep(self) -> str:
        return self._command("DEBUG", "SLEEP", f"{self.rng.uniform(0.3, 1.2):.2f}")

    def _pause(self) -> str | None:
        network = self.field.network
        if network is None or network.held:
            return None
        network.pause()
        self._lasts("pause", self.rng.uniform(0.3, 1.2), network.resume)
        return "network"

    def _cut(self) -> str | None:
        network = self.field.network
        if network is None or network.is_cut:
            return None
        network.cut()
        self._lasts("cut", self.rng.uniform(0.3, 1.2), network.heal)
        return "network"

    def _outage(self) -> str | None:
        """Nobody reaches the server, while tasks run that began before."""
        seconds = self._outage_seconds()
        if self._is_on("outage") or not self._can_cut():
            return None
        self._running(seconds)
        self._in(AHEAD_SECONDS, lambda: self._begin_outage(seconds))
        return "network"

    def _begin_outage(self, seconds: float) -> None:
        if self._can_cut():
            self._cut_all(seconds)
        else:
            self.counts["outage"] -= 1
            self._in(AGAIN_SECONDS, lambda: self._strike("outage"))

    def _outage_of_one(self) -> str | None:
        network, life = self.field.network, self.crew.choose(self.rng)
        if network is None or life is None or network.is_alone(life.slot):
            return None
        seconds = self._outage_seconds()
        self._running(seconds)

        def begin() -> None:
            network.cut_off(life.slot)
            undo = lambda: network.connect_again(life.slot)  # noqa: E731
            self._lasts("outage of one", seconds, undo, life.name)

        self._in(AHEAD_SECONDS, begin)
        return life.name

    def _outage_seconds(self) -> float:
        return self.lease_seconds * self.rng.uniform(*OUTAGE_LEASES)

    def _running(self, seconds: float) -> None:
        """Have tasks begin that run for longer than what comes."""
        for _ in range(RUNNING):
            self.field.senders.send_long(seconds + 2 * AHEAD_SECONDS)

    def _can_cut(self) -> bool:
        return self.field.network is not None and not self.field.network.is_cut

    def _cut_all(self, seconds: float) -> None:
        assert self.field.network
        self.field.network.cut()
        self._lasts("outage", seconds, self.field.network.heal)
