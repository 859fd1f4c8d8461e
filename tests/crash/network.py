"""The ways to the server: one for each worker slot, and one for what sends."""

from __future__ import annotations

from types import TracebackType

from tests.kit.proxy import Proxy


class Network:
    """Proxies to one port; faults hold or cut all of them, or one slot's alone."""

    def __init__(self, target_port: int, slots: int) -> None:
        self._main = Proxy(target_port)
        self._slots = [Proxy(target_port) for _ in range(slots)]
        self._alone: set[int] = set()
        #: Whether all are cut.
        self.is_cut = False

    @property
    def port(self) -> int:
        """For what is no worker."""
        return self._main.port

    def port_of(self, slot: int) -> int:
        return self._slots[slot].port

    @property
    def held(self) -> bool:
        return self._main.held

    @property
    def _all(self) -> list[Proxy]:
        return [self._main, *self._slots]

    def cut(self) -> None:
        self.is_cut = True
        for proxy in self._all:
            proxy.cut()

    def heal(self) -> None:
        """Connect all again but those that are cut off alone."""
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

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for proxy in self._all:
            proxy.close()
