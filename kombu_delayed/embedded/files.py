"""The directory of a server.

It has mode 0700, and must be on a local file system. Its files:

- `lock` is held while a process starts or stops the server.
- `alive` is held by the server itself as long as it lives.
- `broker.sock` is the unix socket (elsewhere if the path is too long for a socket).
- `server.pid` is written by the server.
- `server.log` is the output of the server.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import EmbeddedServerError
from . import posix

WAIT_SECONDS = 60.0
POLL_SECONDS = 0.01
LOG_TAIL_LINES = 10
#: With less than this a server does not start.
FULL_BYTES = 16_384
# sun_path holds 108 bytes on Linux and 104 on macOS.
SOCKET_PATH_MAX_BYTES = 100
#: For the socket if TMPDIR itself is too long.
SHORT_DIRECTORY = "/tmp"


@contextlib.contextmanager
def explained(directory: str | Path) -> Iterator[Path]:
    """Yield the absolute path, and explain errors with it and with the server's log.

    Raises EmbeddedServerError if there is none, and on a system where no server can run.
    """
    posix.check()
    try:
        path = Path(directory).expanduser().resolve()
    except (RuntimeError, OSError, ValueError) as error:  # ~nobody, a circle of links, a null byte
        raise EmbeddedServerError(f"{directory} cannot be a directory: {error}") from error
    try:
        yield path
    except (OSError, subprocess.SubprocessError) as error:
        raise EmbeddedServerError(
            f"The server directory {path} is not usable: {error}{log_tail(path)}"
        ) from error


def make_private(path: Path) -> None:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if found.st_uid != os.geteuid():
        raise EmbeddedServerError(
            f"{path} belongs to user id {found.st_uid}, not to {os.geteuid()}: name a directory "
            "of your own (a new subdirectory will do)."
        )
    if not stat.S_IMODE(found.st_mode) & 0o077:
        return
    # Closing a home directory or / that was named by mistake would do harm.
    if any(path.iterdir()) and not (path / "lock").exists():
        raise EmbeddedServerError(
            f"{path} is open to other users and holds other files: name an empty directory, "
            f"or run: chmod 700 {path}"
        )
    path.chmod(0o700)


def socket_path(directory: Path) -> Path:
    socket = directory / "broker.sock"
    if len(os.fsencode(socket)) <= SOCKET_PATH_MAX_BYTES:
        return socket
    digest = hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
    name = f"kombu-delayed-{os.geteuid()}-{digest}"
    private = Path(tempfile.gettempdir()) / name
    if len(os.fsencode(private / "broker.sock")) > SOCKET_PATH_MAX_BYTES:
        private = Path(SHORT_DIRECTORY) / name
    make_private(private)
    return private / "broker.sock"


def held(directory: Path) -> bool:
    try:
        with open(directory / "alive") as alive:
            return not posix.try_lock(alive.fileno(), shared=True)
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[float]:
    """Hold the lock on a server's start and end; yields until when there is time for that."""
    deadline = time.monotonic() + WAIT_SECONDS
    with open(directory / "lock", "a") as lock:
        while not posix.try_lock(lock.fileno()):
            pause(deadline, lambda: f"another process holds {directory / 'lock'}.")
        try:
            yield deadline
        finally:
            # A child forked meanwhile shares the descriptor: closing alone would not unlock.
            posix.unlock(lock.fileno())


def pause(deadline: float, reason: Callable[[], str]) -> None:
    if time.monotonic() >= deadline:
        raise EmbeddedServerError(f"Gave up after {WAIT_SECONDS:g} seconds: {reason()}")
    time.sleep(POLL_SECONDS)


def pid_text(directory: Path) -> str:
    try:
        return (directory / "server.pid").read_text().strip() or "unknown"
    except OSError:
        return "unknown"


def log_tail(directory: Path) -> str:
    """The last lines of the server's log; on a full disk it cannot write any."""
    found = ["its disk is full"] if _is_full(directory) else []
    with contextlib.suppress(OSError):
        text = (directory / "server.log").read_text(errors="replace")
        if lines := text.splitlines()[-LOG_TAIL_LINES:]:
            found += [f"last lines of {directory / 'server.log'}:", *lines]
    return "".join(f"\n  {line}" for line in found)


def _is_full(directory: Path) -> bool:
    try:
        return shutil.disk_usage(directory).free < FULL_BYTES
    except OSError:
        return False
