"""Bounds the number of long requests: event streams, long polls, and searches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from ..auth.identity import ANYBODY, Identity
from ..problems import busy


class Places:
    """At most `most` requests at a time. Errors name them by `what`.

    One token may have half of these places, or half of `shared` if that is given.
    """

    def __init__(self, most: int, what: str, shared: int | None = None) -> None:
        self._most, self._what, self._shared = most, what, max(shared or most, 2)
        self.taken: Counter[str] = Counter()
        self.closed = False

    def begin(self, identity: Identity) -> None:
        """Take a place. Raises a Problem if all are taken, or if this token has its half."""
        if self.closed or self.taken.total() >= self._most:
            raise busy(f"too many {self._what} are open", 503, 5)
        if identity is not ANYBODY and 2 * self.taken[identity.name] >= self._shared:
            raise busy(f"too many {self._what} of this token are open", 429, 5)
        self.taken[identity.name] += 1

    @contextmanager
    def place(self, identity: Identity) -> Iterator[None]:
        """Hold a place within a block. Raises as `begin`."""
        self.begin(identity)
        try:
            yield
        finally:
            self.end(identity)

    def end(self, identity: Identity) -> None:
        self.taken[identity.name] -= 1
        self.taken += Counter()  # removes identities that have no place
