"""Messages that were claimed and not handed out."""

from __future__ import annotations

from collections import deque
from contextlib import suppress

from ..policy.admission import Claimed


class Buffer(deque[Claimed]):
    """What was claimed and not handed out.

    A signal handler may take from it at any time, and the keeper's thread from its end.
    """

    def first(self) -> Claimed | None:
        """The one that is to be handed out next."""
        try:
            return self[0]
        except IndexError:
            return None

    def take_out(self, entry: Claimed) -> bool:
        """Whether the first of what was claimed was still there, and not given back meanwhile."""
        try:
            is_there = self[0] is entry
            if is_there:
                self.popleft()
        except IndexError:  # the keeper's thread has taken it meanwhile
            return False
        return is_there

    def take_out_of(self, queue: str) -> list[Claimed]:
        """What was claimed of a queue, which is not in the buffer any more."""
        taken: list[Claimed] = []
        with suppress(IndexError):  # another thread takes from its end
            for _ in range(len(self)):
                entry = self.popleft()
                (taken if entry.queue == queue else self).append(entry)
        return taken
