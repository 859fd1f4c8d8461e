"""The version of the format in which a database keeps messages, as `major.minor`.

A newer minor version can be read and written by this one. A newer major version cannot: a process
that meets it stops. An older major version stays as it is until an operator raises it, since the
processes that know no newer one would stop.

- 1: all payloads of a queue are in one hash.
- 2: a hash that becomes large is spread over several keys.

A database without a version gets the newest one, or 1 if it has queues: release 0.1.0 wrote none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from redis.exceptions import NoPermissionError, ResponseError

from ..errors import FormatError, ServerFull, ServerNotReady
from .commands import keys_like
from .native import get_logger

logger = get_logger(__name__)

#: The version that this package reads and writes.
MAJOR, MINOR = 2, 0

#: The first major version that spreads large hashes over several keys.
BUCKETS_SINCE = 2

#: How often a running process reads the version again. It also does so after each reconnect.
LOOK_SECONDS = 30.0

_VERSION = re.compile(rb"(\d+)\.(\d+)")

#: Keys of a queue that say that a database is in use, and those that only newer formats have.
_IN_USE = re.compile(rb"\}:(consumers|dead|messages|partitions)$")
_SPREAD = b":buckets"

#: How many keys one call scans.
_KEYS = 5_000

#: Refusals of the write: a full server, a replica, a user who may only read.
_REFUSED = (ResponseError, ServerFull, ServerNotReady)

Send = Callable[..., Any]


class Format:
    """The version of a database, and whether this package can work with it.

    `keys` is the pattern of all keys of its queues.
    """

    def __init__(self, key: str, keys: str) -> None:
        self.key = key
        self._keys = keys
        #: The major version that the database has; 0: it has not been asked yet.
        self.major = 0
        #: Whether large hashes may be spread over several keys. Each script call reads it.
        self.has_buckets = False
        self._is_forbidden = False

    def look(self, send: Send, servers: Callable[[], Iterable[Send]] | None = None) -> None:
        """Read the version with `send`, and write it if there is none. Raises FormatError.

        `servers` returns those that have queues, if there are several.
        """
        try:
            found = send("GET", self.key)
        except NoPermissionError as error:
            self._warn_once(error)
            return
        if found is not None:
            self._found(check(found))
            return
        try:
            # A version that was known before has been deleted, with or without the data.
            major = self.major or self._major_of_data(servers() if servers else [send])
            send("SET", self.key, f"{MAJOR}.{MINOR}" if major == MAJOR else f"{major}.0", "NX")
            found = send("GET", self.key)  # another process may have been faster
        except _REFUSED:
            return
        self._found(major if found is None else check(found))

    def _major_of_data(self, servers: Iterable[Send]) -> int:
        """Return the newest version, or 1 if queues are in use and none has a hash that is spread.

        Scans all key names, once in the life of a database.
        """
        major = MAJOR
        for send in servers:
            for key in keys_like(send, self._keys, _KEYS):
                if key.endswith(_SPREAD):
                    return MAJOR
                if _IN_USE.search(key):
                    major = 1
        return major

    def upgrade(self, send: Send) -> bool:
        """Raise the version to this package's. Returns whether it was lower. Raises FormatError."""
        self.look(send)
        if self.major == MAJOR:
            return False
        if not self.major and self._is_forbidden:
            raise FormatError(f"the user of the broker URL may not read the key {self.key!r}")
        send("SET", self.key, f"{MAJOR}.{MINOR}")
        self._found(MAJOR)
        return True

    def _found(self, major: int) -> None:
        self.major = major
        self.has_buckets = major >= BUCKETS_SINCE

    def _warn_once(self, error: Exception) -> None:
        if not self._is_forbidden:
            self._is_forbidden = True
            logger.warning(
                "The user of the broker URL may not read the key %r, so a newer format would go "
                "unnoticed: %s. Allow it with ACL SETUSER <user> +get +set ~%s",
                self.key,
                error,
                self.key,
            )


def check(found: bytes) -> int:
    """Return the major version. Raises FormatError if this package cannot work with it."""
    version = _VERSION.fullmatch(found)
    if version and int(version[1]) <= MAJOR:
        return int(version[1])
    shown = found.decode(errors="backslashreplace")
    raise FormatError(
        f"the messages in Redis have format {shown}, and this version of kombu-delayed knows "
        f"formats up to {MAJOR}: upgrade kombu-delayed in this process to the version that the "
        "other processes have, and start it again"
    )
