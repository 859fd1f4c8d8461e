"""What was read a moment ago, for all who look at the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from math import inf
from typing import Any, TypeVar

from kombu.utils.functional import LRUCache

T = TypeVar("T")

#: Readings that are kept.
KEPT = 1_000

#: What takes long to read is kept for so many times as long, but no longer than this many seconds.
SHARE, LONGEST = 20, 60.0


class _Reading:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.at = -inf
        self.took = 0.0
        self.lasts = False
        self.value: Any = None


class Cache:
    """Readings by their keys. Threads that want the same one wait for one of them to read it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readings: Any = LRUCache(KEPT)

    def get(self, key: Hashable, seconds: float, read: Callable[[], T]) -> T:
        """A reading that is no older than so many seconds, or 20 times what it takes.

        That is a minute at most: Redis may have stood still meanwhile.
        """
        reading = self._of(key)
        with reading.lock:
            began = time.monotonic()
            if began - reading.at >= max(seconds, min(SHARE * reading.took, LONGEST)):
                reading.value, reading.lasts = read(), seconds == inf
                reading.at = time.monotonic()
                reading.took = reading.at - began
            value: T = reading.value
            return value

    def forget(self) -> None:
        """Read anew what does not last: something was changed."""
        with self._lock:
            for key in [key for key, each in self._readings.items() if not each.lasts]:
                del self._readings[key]

    def _of(self, key: Hashable) -> _Reading:
        with self._lock:
            reading: _Reading = self._readings.setdefault(key, _Reading())
            return reading
