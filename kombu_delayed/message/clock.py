"""The time that policies see: real time, unless a test has moved it ahead.

Redis holds due times in real time. A first due time (`Wait`) is by this clock.
"""

from __future__ import annotations

import time

#: How far it is ahead of real time. `kombu_delayed.testing.Clock` sets it.
ahead_ms = 0


def now_ms() -> int:
    return int(time.time() * 1000) + ahead_ms
