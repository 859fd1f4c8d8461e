"""The time that policies see: real time, unless a test has moved it ahead.

Due times in Redis are in real time. A first due time (`Wait`) is in the time of this clock.
"""

from __future__ import annotations

import time

#: How far this clock is ahead of real time. `kombu_delayed.testing.Clock` sets it.
ahead_ms = 0


def now_ms() -> int:
    return int(time.time() * 1000) + ahead_ms
