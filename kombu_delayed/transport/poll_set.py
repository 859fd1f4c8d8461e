"""Descriptors that an event loop polls as one."""

from __future__ import annotations

import selectors
from contextlib import suppress
from typing import Any


class PollSet:
    """Polls many descriptors and has one for an event loop, with the interface of Kombu's pollers.

    A descriptor that is closed while a forked child has its file open stays in an epoll, and its
    events with it. The event loop's epoll is there to stay, but one like this can be replaced.
    """

    def __init__(self) -> None:
        self._selector: Any = selectors.DefaultSelector()

    def fileno(self) -> int:
        """The descriptor that is readable when one of them is."""
        return int(self._selector.fileno())

    def register(self, fd: int, flags: int) -> None:
        """Poll a descriptor from now on."""
        self.unregister(fd)
        self._selector.register(fd, selectors.EVENT_READ)

    def unregister(self, fd: int) -> None:
        """Poll a descriptor no more."""
        with suppress(KeyError):
            self._selector.unregister(fd)

    def poll(self, timeout: float | None) -> list[tuple[int, int]]:
        """Those that are readable, each as (descriptor, flags)."""
        return [(key.fd, events) for key, events in self._selector.select(timeout)]

    def close(self) -> None:
        """Poll nothing any more."""
        self._selector.close()
