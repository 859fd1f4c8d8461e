"""A server whose clock can be stepped while it runs, by libfaketime."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.kit.servers import Server, start_server

_LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))


class Clock:
    """The clock of one server: `step` moves it, forwards or backwards, at once and for good."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ahead_seconds = 0.0
        self._steps = 0
        self.step(0)

    @property
    def environment(self) -> dict[str, str]:
        """What the server has to be started with."""
        return {
            "LD_PRELOAD": str(_LIBRARIES[0]),
            "FAKETIME_TIMESTAMP_FILE": str(self._path),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def step(self, seconds: float) -> None:
        """Set the clock forward, or back where the number is negative."""
        self._ahead_seconds += seconds
        temporary = self._path.with_suffix(".new")
        temporary.write_text(f"{self._ahead_seconds:+.3f}\n")
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
    if not _LIBRARIES:
        if os.environ.get("CI", "").lower() == "true":
            raise RuntimeError("libfaketime is not installed")
        pytest.skip("libfaketime is not installed (Debian: apt install faketime)")
    directory.mkdir(parents=True, exist_ok=True)
    clock = Clock(directory / "clock")
    options.setdefault("port", 0)
    with start_server(kind, directory, environment=clock.environment, **options) as server:
        yield server, clock
