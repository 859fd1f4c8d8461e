"""Servers whose clock can be stepped while they run, by libfaketime."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.kit.servers import Server, missing, start_server

#: The path in Debian's package libfaketime.
LIBRARY = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)


class Clock:
    """The clock of servers; `step` moves it forwards or backwards, at once and permanently."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ahead_seconds = 0.0
        self._steps = 0
        self.set(0)

    @property
    def environment(self) -> dict[str, str]:
        """The environment that servers must be started with."""
        return {
            "LD_PRELOAD": str(LIBRARY),
            "FAKETIME_TIMESTAMP_FILE": str(self._path),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def step(self, seconds: float) -> None:
        """Move the clock forward, or back if the number is negative."""
        self.set(self._ahead_seconds + seconds)

    def set(self, ahead_seconds: float) -> None:
        """Set it this far ahead of this machine's clock."""
        self._ahead_seconds = ahead_seconds
        temporary = self._path.with_suffix(".new")
        temporary.write_text(f"{ahead_seconds:+.3f}\n")
        self._steps += 1
        os.utime(temporary, (self._steps * 10, self._steps * 10))  # it compares whole seconds
        os.replace(temporary, self._path)  # the server reads it at any moment


@contextmanager
def stepped_server(
    directory: Path, kind: str = "valkey", **options: Any
) -> Iterator[tuple[Server, Clock]]:
    """Start a server with a clock of its own; `options` are those of `start_server`.

    Debian's Redis does not start under libfaketime (its jemalloc asks for the time too early).
    Without libfaketime the test is skipped, and fails when CI=true.
    """
    if not LIBRARY:
        missing("libfaketime is not installed (Debian: apt install faketime)")
    directory.mkdir(parents=True, exist_ok=True)
    clock = Clock(directory / "clock")
    options.setdefault("port", 0)
    with start_server(kind, directory, environment=clock.environment, **options) as server:
        yield server, clock
