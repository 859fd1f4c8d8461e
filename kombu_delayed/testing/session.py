"""An embedded server that ends with the test session, at the latest when the next one begins."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..embedded import files, posix
from ..embedded import server as embedded
from ..errors import EmbeddedServerError

PREFIX = "kombu-delayed-test-"

#: A file in the server's directory, locked by the session as long as it lives.
LOCK = "session"

#: A directory that is younger may be one whose session has not locked it yet.
YOUNG_SECONDS = 60


@contextmanager
def session_server() -> Iterator[Path]:
    """Run a server in a temporary directory. Raises EmbeddedServerError if it does not start."""
    posix.check()
    end_left_over()
    directory = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()
    with open(directory / LOCK, "w") as lock:
        posix.lock(lock.fileno())
        try:
            embedded.ensure(directory)
            yield directory
        finally:
            _end(directory)


def end_left_over() -> None:
    """End the servers of sessions that were killed."""
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            found = directory.lstat()
            is_own = found.st_uid == os.geteuid()  # else its socket may be a link to any server
            if not is_own or time.time() - found.st_mtime < YOUNG_SECONDS:
                continue
            with open(directory / LOCK) as lock:
                if posix.try_lock(lock.fileno()):
                    _end(directory)
        except (OSError, EmbeddedServerError):  # in use
            continue


def _end(directory: Path) -> None:
    embedded.stop(directory)
    for each in {directory, files.socket_path(directory).parent}:
        shutil.rmtree(each, ignore_errors=True)
