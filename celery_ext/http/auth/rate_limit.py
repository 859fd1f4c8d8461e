"""Limits how often a caller may send requests, in one process."""

from __future__ import annotations

import time
from typing import Any

from kombu.utils.functional import LRUCache

from ..problems import busy

#: How many wrong tokens an address may send per second if no rate is set.
WRONG_TOKENS_PER_SECOND = 5.0

#: How many callers are remembered.
REMEMBERED = 10_000


class RateLimit:
    """A bucket for each caller, which holds the requests of two seconds; 0 per second: no limit."""

    def __init__(self, per_second: float) -> None:
        self._per_second = per_second
        self._most = max(2 * per_second, 1)
        self._buckets: Any = LRUCache(REMEMBERED)

    def check(self, name: str) -> None:
        """Count a request of a caller. Raises a Problem if there are too many."""
        if not self._per_second:
            return
        now = time.monotonic()
        at, left = self._buckets.get(name, (now, self._most))
        left = min(self._most, left + (now - at) * self._per_second)
        allowed = left >= 1
        self._buckets[name] = (now, left - 1 if allowed else left)
        if not allowed:
            wait = max(1, round((1 - left) / self._per_second + 0.5))
            raise busy("too many requests", 429, wait)
