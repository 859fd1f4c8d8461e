"""Ends a wait early: from any thread, or when it is time."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable
from time import monotonic
from typing import Any


class Alarm:
    """Ends a poll early, from any thread."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._rung = False
        #: The descriptor to poll.
        self.fd = self._reader.fileno()

    def ring(self) -> None:
        """End the poll."""
        if not self._rung:
            self._rung = True
            self._send()

    def _send(self) -> None:
        try:
            self._writer.send(b"\0")
        except OSError:  # the connection is closed already
            self._rung = False

    def answer(self) -> None:
        """Be ready to ring again."""
        try:
            self._reader.recv(64)
        except OSError:
            return
        finally:
            self._rung = False

    def close(self) -> None:
        """Free the descriptors."""
        self._reader.close()
        self._writer.close()


class Timer:
    """A timer of an event loop, which fires at the earliest of the times that it is given."""

    def __init__(self, loop: Any, on_time: Callable[[], None]) -> None:
        self._loop = loop
        self._on_time = on_time
        self._timer: Any = None
        self._at = math.inf

    def set(self, at: float) -> bool:
        """Set a time by the monotonic clock; returns whether it is earlier than the one before."""
        if at >= self._at:
            return False
        self.cancel()
        self._at = at
        self._timer = self._loop.call_later(max(at - monotonic(), 0), self._fire)
        return True

    def _fire(self) -> None:
        self._timer, self._at = None, math.inf
        self._on_time()

    def cancel(self) -> None:
        """Forget the time."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._at = None, math.inf
