"""The POSIX functions that an embedded server needs, checked only when they are used.

Producers and clients of a server elsewhere also run on systems without them.
"""

from __future__ import annotations

import os

from ..errors import EmbeddedServerError

try:
    import fcntl
except ImportError:  # Windows, and some restricted systems
    fcntl = None  # type: ignore[assignment]


def check() -> None:
    """Raise EmbeddedServerError on a system where no embedded server can run."""
    if fcntl is None or not hasattr(os, "geteuid"):
        raise EmbeddedServerError(
            "An embedded server needs a POSIX system, such as Linux or macOS, with fcntl. Start a "
            "server elsewhere (in a container, or in WSL) and name it: delayed+redis://host:6379/0"
        )


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock a file unless its lock is held. Returns whether it is locked now."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock(descriptor: int) -> None:
    """Lock a file, however long that takes."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)


def unlock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_UN)
