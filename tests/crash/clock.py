"""The server's clock: libfaketime lets faults step it, and the verdict knows what it showed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from redis.exceptions import RedisError

from tests.kit import servers
from tests.kit.servers import Server
from tests.kit.wait import wait_until

#: The kind of server whose clock can be stepped.
KIND = "stepped"
NEVER = float("inf")
#: A server shows its new time after at most one turn of its event loop; some keep the old one for
#: a command more.
SHOWN_SECONDS = 0.5


def find_library() -> Path | None:
    """Where Debian's package libfaketime has it."""
    return next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)


class Span(NamedTuple):
    """From and until when the server's clock may have been so far ahead of this machine's."""

    since: float
    until: float
    ahead_seconds: float


@dataclass
class Readings:
    """What the server's clock showed. Neighbouring spans overlap while a step was under way."""

    spans: list[Span] = field(default_factory=lambda: [Span(-NEVER, NEVER, 0.0)])

    @property
    def ahead_seconds(self) -> float:
        return self.spans[-1].ahead_seconds

    def stepped(self, since: float, until: float, ahead_seconds: float) -> None:
        """The clock was stepped at some time between these two."""
        self.spans[-1] = self.spans[-1]._replace(until=until)
        self.spans.append(Span(since, NEVER, ahead_seconds))

    def least_ahead(self, since: float, until: float) -> float:
        """How far ahead it was at least at some moment between two."""
        known = (span for span in self.spans if span.since <= until and since <= span.until)
        return min(span.ahead_seconds for span in known)

    def reached(self, due: float, since: float = -NEVER) -> float:
        """When the clock may first have shown `due`, or a later time, at or after `since`."""
        return min(
            (
                at
                for span in self.spans
                if (at := max(span.since, since, due - span.ahead_seconds)) < span.until
            ),
            default=NEVER,
        )

    def steps(self, since: float, until: float) -> int:
        """How often it was stepped between two moments."""
        return sum(
            since <= span.since + SHOWN_SECONDS and span.since <= until for span in self.spans
        )


class Clock:
    """One clock for all servers of the kind `KIND` that are started while `steppable` lasts."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._writes = 0
        self.readings = Readings()
        self._write(0)

    def step(self, ahead_seconds: float, running: list[Server], password: str = "") -> None:
        """Step it; returns when all that run show the new time."""
        before = time.time()
        self._write(ahead_seconds)
        for server in running:
            wait_until(
                lambda server=server: self._shows(server, password, ahead_seconds),
                f"the clock of {server.port} is {ahead_seconds:+.0f} s ahead",
            )
        self.readings.stepped(before, time.time(), ahead_seconds)

    def _write(self, ahead_seconds: float) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(f"{ahead_seconds:+.0f}\n")
        self._writes += 1
        os.utime(new, (self._writes * 10, self._writes * 10))  # whole seconds are compared
        new.rename(self._file)

    @staticmethod
    def _shows(server: Server, password: str, ahead_seconds: float) -> bool:
        options = {"password": password} if password else {}
        try:
            with server.client(socket_timeout=5, **options) as client:
                seconds, _ = client.time()
        except RedisError:
            return False
        return abs(seconds - time.time() - ahead_seconds) < 5


@contextlib.contextmanager
def steppable(directory: Path, library: Path) -> Iterator[Clock]:
    """Servers of the kind `KIND` use a clock that can be stepped. Sentinels use the real one."""
    clock = Clock(directory / "clock")
    binary = servers._BINARIES["valkey"]()
    script = directory / "stepped-server"
    script.write_text(
        f"""#!/bin/sh
case "$*" in *--sentinel*) exec "{binary}" "$@";; esac
export LD_PRELOAD="{library}" FAKETIME_TIMESTAMP_FILE="{directory / "clock"}"
export FAKETIME_NO_CACHE=1 FAKETIME_DONT_FAKE_MONOTONIC=1
exec "{binary}" "$@"
"""
    )
    script.chmod(0o700)
    servers._BINARIES[KIND] = lambda: script
    try:
        yield clock
    finally:
        del servers._BINARIES[KIND]
