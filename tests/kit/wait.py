"""Wait for a condition instead of sleeping."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(
    predicate: Callable[[], T],
    description: str,
    timeout_seconds: float = 30,
    interval_seconds: float = 0.01,
) -> T:
    """Return the first truthy value of `predicate`, or fail naming what was waited for."""
    deadline = time.monotonic() + timeout_seconds
    while not (value := predicate()):
        if time.monotonic() >= deadline:
            raise AssertionError(
                f"not within {timeout_seconds:g} s: {description} (last value: {value!r})"
            )
        time.sleep(interval_seconds)
    return value
