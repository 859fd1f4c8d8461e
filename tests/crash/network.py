"""The ways to the server: one for each worker slot, and one for senders."""

from __future__ import annotations

from tests.kit.proxy import Proxy


class Network:
    """Proxies to one port; faults hold or cut all of them, or one slot's alone."""

    def __init__(self, target_port: int, slots: int) -> None:
        self._main = Proxy(target_port)
        self._slots = [Proxy(target_port) for _ in range(slots)]
        self._all = [self._main, *self._slots]
        self._alone: set[int] = set()
        #: Whether all are cut.
        self.is_cut = False

    def port(self, slot: int | None) -> int:
        """The port for a worker's slot, or for a process that is not a worker if it is None."""
        return (self._main if slot is None else self._slots[slot]).port

    @property
    def held(self) -> bool:
        return self._main.held

    def cut(self) -> None:
        self.is_cut = True
        for proxy in self._all:
            proxy.cut()

    def heal(self) -> None:
        """Connect all again except those that are cut off alone."""
        self.is_cut = False
        self._main.heal()
        for slot, proxy in enumerate(self._slots):
            if slot not in self._alone:
                proxy.heal()

    def pause(self) -> None:
        for proxy in self._all:
            proxy.pause()

    def resume(self) -> None:
        for proxy in self._all:
            proxy.resume()

    def cut_off(self, slot: int) -> None:
        self._alone.add(slot)
        self._slots[slot].cut()

    def connect_again(self, slot: int) -> None:
        self._alone.discard(slot)
        if not self.is_cut:
            self._slots[slot].heal()

    def is_alone(self, slot: int) -> bool:
        return slot in self._alone

    def restore(self) -> None:
        self.resume()
        self._alone.clear()
        self.heal()

    def close(self) -> None:
        for proxy in self._all:
            proxy.close()
