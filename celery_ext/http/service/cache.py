"""Caches readings for a moment, for all requests that need the same ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from math import inf
from typing import Any, TypeVar

from kombu.utils.functional import LRUCache

T = TypeVar("T")

#: How many readings are cached: several of each of a thousand queues. With fewer, a look at all
#: queues would drop the first readings before the next look could use them.
KEPT = 5_000

#: A slow reading is cached for SHARE times as long as it took, but for at most LONGEST seconds.
SHARE, LONGEST = 20, 60.0


class _Reading:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.at = -inf
        self.took = 0.0
        self.lasts = False
        self.value: Any = None


class Cache:
    """Readings by key. If several threads want the same one, one reads it and the others wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readings: Any = LRUCache(KEPT)

    def get(self, key: Hashable, seconds: float, read: Callable[[], T]) -> T:
        """Return a reading that is at most `seconds` old, or 20 times as old as it took to read.

        The latter is a minute at most: a reading may be slow only because Redis stood still.
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
        """Drop all readings after a change, except those that are cached for ever."""
        with self._lock:
            for key in [key for key, each in self._readings.items() if not each.lasts]:
                del self._readings[key]

    def _of(self, key: Hashable) -> _Reading:
        with self._lock:
            reading: _Reading = self._readings.setdefault(key, _Reading())
            return reading
