"""Wait for a condition instead of sleeping."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def wait_until(
    predicate: Callable[[], T],
    description: str,
    timeout_seconds: float = 90,
    interval_seconds: float = 0.01,
) -> T:
    """Return the first truthy value of `predicate`; fail on timeout, naming the description."""
    deadline = time.monotonic() + timeout_seconds
    while not (value := predicate()):
        if time.monotonic() >= deadline:
            raise AssertionError(
                f"not within {timeout_seconds:g} s: {description} (last value: {value!r})"
            )
        time.sleep(interval_seconds)
    return value


class Stopwatch:
    """Time since it was made, less the time that some processes, or this one, waited for a CPU."""

    def __init__(self, *pids: int) -> None:
        self._pids = {os.getpid(), *pids}
        self._began, self._starved = time.monotonic(), self._starved_seconds()

    @property
    def seconds(self) -> float:
        starved = max(0.0, self._starved_seconds() - self._starved)
        return time.monotonic() - self._began - starved

    def _starved_seconds(self) -> float:
        return sum(map(starved_seconds, self._pids))


def starved_seconds(pid: int) -> float:
    """How long the first thread of a process was ready to run without getting a CPU."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):  # the process has ended, or this is not Linux
        return 0.0
