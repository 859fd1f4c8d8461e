"""Places for requests that last: event streams, and long polls."""

from __future__ import annotations

from collections import Counter

from ..auth.identity import ANYBODY, Identity
from ..problems import busy


class Places:
    """So many at a time; `what` they are called in errors. One token may have half of them."""

    def __init__(self, most: int, what: str) -> None:
        self._most, self._what = most, what
        self.taken: Counter[str] = Counter()
        self.closed = False

    def begin(self, identity: Identity) -> None:
        """Raises a Problem where there are too many, or half of all are of one token."""
        if self.closed or self.taken.total() >= self._most:
            raise busy(f"too many {self._what} are open", 503, 5)
        if identity is not ANYBODY and 2 * self.taken[identity.name] >= max(self._most, 2):
            raise busy(f"too many {self._what} of this token are open", 429, 5)
        self.taken[identity.name] += 1

    def end(self, identity: Identity) -> None:
        self.taken[identity.name] -= 1
        self.taken += Counter()  # without those of no stream
