"""Threads that send all the time while other things go wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from kombu.exceptions import OperationalError

from kombu_delayed.errors import DelayedError
from tests.kit.wait import wait_until


class Producers:
    """Collects accepted messages; a message whose sending raised an error does not count."""

    def __init__(
        self, send: Callable[[int], Any], count: int = 2, pause_seconds: float = 0.01
    ) -> None:
        self.sent: list[Any] = []
        self.errors = 0
        self._send = send
        self._pause_seconds = pause_seconds
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(count)]

    def _run(self) -> None:
        n = 0
        while not self._stop.wait(self._pause_seconds):
            n += 1
            try:
                self.sent.append(self._send(n))
            except (OperationalError, OSError, DelayedError):  # it may or may not be stored
                self.errors += 1

    def __enter__(self) -> Producers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def send_more(self, count: int = 20, timeout_seconds: float = 30) -> None:
        wanted = len(self.sent) + count
        wait_until(lambda: len(self.sent) >= wanted, f"{count} more are sent", timeout_seconds)
