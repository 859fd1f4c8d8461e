"""Faults of workers: they are killed, stopped, told to end, and deployed."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection

from tests.crash.crew import Life
from tests.crash.faults import Faults
from tests.crash.schedule import TRYING

#: So long workers of two versions, or with other policies, are there together.
MIXED_SECONDS = 8.0


class WorkerFaults(Faults):
    """What strikes one worker, or half of them."""

    def finish(self) -> None:
        super().finish()
        self.crew.changed.clear()
        self._deploy(self.crew.unlike)

    def _kill(self) -> str | None:
        life = self.crew.choose(self.rng)
        if life:
            self.crew.kill(life)
        return life and life.name

    def _kill_main(self) -> str | None:
        life = self.crew.choose(self.rng, "prefork") or self.crew.choose(self.rng)
        if life:
            self.crew.kill(life, "main killed", main_only=True)
        return life and life.name

    def _stop(self) -> str | None:
        life = self.crew.choose(self.rng)
        if life:
            self.crew.stop(life)
            seconds = self.lease_seconds + self.rng.uniform(0.5, 2.5)
            self._lasts("stop", seconds, lambda: self.crew.resume(life), life.name)
        return life and life.name

    def _term(self) -> str | None:
        return self._told_to_end(self.crew.choose(self.rng), signal.SIGTERM, "terminated")

    def _quit(self) -> str | None:
        return self._told_to_end(self.crew.choose(self.rng), signal.SIGQUIT, "quit")

    def _told_to_end(self, life: Life | None, number: int, fate: str) -> str | None:
        if life:
            self.crew.end(life, number, fate)
        return life and life.name

    def _redeploy(self) -> str | None:
        """Half of the slots run the previous version for a while."""
        slots = range(self.rng.randrange(2), len(self.crew.slots), 2)
        return self._changed("redeploy", slots, "previous")

    def _policyless(self) -> str | None:
        return self._changed("policyless", [self.rng.randrange(len(self.crew.slots))], "policyless")

    def _changed(self, kind: str, slots: Collection[int], how: str) -> str | None:
        if self.crew.is_mixed or self._is_on(*TRYING):
            return None
        self.crew.changed.update(dict.fromkeys(slots, how))
        self._deploy(slots)
        self._lasts(kind, MIXED_SECONDS, self._back(slots))
        return "half"

    def _back(self, slots: Collection[int]) -> Callable[[], None]:
        def undo() -> None:
            for slot in slots:
                self.crew.changed.pop(slot, None)
            self._deploy(slots)

        return undo

    def _deploy(self, slots: Collection[int]) -> None:
        for slot in slots:
            life = self.crew.current[slot]
            self.crew.resume(life)
            if not life.fate:
                self.crew.end(life, signal.SIGTERM, "terminated")
