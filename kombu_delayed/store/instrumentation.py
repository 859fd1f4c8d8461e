"""Who counts what happens to messages in this process: nobody, unless there is a `current`."""

from __future__ import annotations


class Meter:
    """Told in whichever thread something happens; this one does nothing with it.

    Its methods are short, and raise nothing. A queue may be one shard of a queue.
    """

    def scheduled(self, queue: str, count: int) -> None:
        """So many messages are in the backlog now that were not."""

    def delivered(self, queue: str, late_seconds: float | None, deliveries: int) -> None:
        """A message goes to its consumer, so long after it was due; None: it was never delayed.

        `deliveries` counts the earlier ones, which were in vain.
        """

    def reclaimed(self, queue: str, count: int) -> None:
        """So many messages of a consumer that has stopped answering are back."""

    def buried(self, queue: str, count: int) -> None:
        """So many messages have become dead letters."""

    def lease_lost(self) -> None:
        """A consumer of this process has lost its lease, and what it held."""

    def script_took(self, name: str, seconds: float) -> None:
        """A script was sent and its answer read, or an error."""


current: Meter | None = None
