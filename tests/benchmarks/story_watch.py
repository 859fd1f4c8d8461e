"""Watches a running story: the server's stalls and memory, and the memory of Spark."""

from __future__ import annotations

import os
import signal
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter

import redis

PING = struct.Struct("<dd")
PROBE_SECONDS, LOOK_SECONDS = 0.002, 0.25
MIB = 2**20


def ping(url: str, path: str) -> None:
    """Record when the server was asked and how long it took, until this process is ended."""
    client = redis.Redis.from_url(url)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    while True:
        at, began = time.time(), perf_counter()
        client.ping()
        os.write(descriptor, PING.pack(at, perf_counter() - began))
        time.sleep(PROBE_SECONDS)


def processes(sessions: Iterable[int]) -> list[int]:
    """The processes of some sessions of the operating system."""
    wanted, found = set(sessions), []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            if int(path.read_text().rpartition(")")[2].split()[3]) in wanted:
                found.append(int(path.parent.name))
    return found


def kill(session: int) -> None:
    """SIGKILL for all processes of a session that this program has started."""
    for pid in processes([session]):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def resident_mib(sessions: Iterable[int]) -> float:
    """Memory of the processes of some sessions; shared memory counts once for each."""
    pages = 0
    for pid in processes(sessions):
        with suppress(OSError, ValueError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


class Watch:
    """Watches a server and the sessions in `sessions`; the highest values since `begin`."""

    def __init__(self, url: str, directory: Path) -> None:
        self._client = redis.Redis.from_url(url)
        self._pings = directory / "pings"
        self._probe = get_context("spawn").Process(
            target=ping, args=(url, str(self._pings)), daemon=True
        )
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.sessions: set[int] = set()
        self.spark_mib = self.server_mib = 0.0

    def begin(self) -> None:
        self.spark_mib = self.server_mib = 0.0

    def stalls_ms(self, began: float, ended: float) -> list[float]:
        """How long the server took to answer each PING in a period, in ms."""
        data = self._pings.read_bytes()
        whole = data[: len(data) // PING.size * PING.size]
        return [s * 1000 for at, s in PING.iter_unpack(whole) if began <= at <= ended]

    def _look(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self.spark_mib = max(self.spark_mib, resident_mib(self.sessions))
            used = self._client.info("memory")["used_memory"]  # type: ignore[index]
            self.server_mib = max(self.server_mib, used / MIB)

    @contextmanager
    def running(self) -> Iterator[Watch]:
        self._probe.start()
        self._thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            self._thread.join()
            self._probe.kill()
            self._probe.join()
            self._client.close()
