"""A claim that was sent, and its answer, for which an event loop may wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kombu_delayed.store.claimable import Delivered
from kombu_delayed.store.store import Store, delivered

from ..lease.standstill import Unbegun
from ..session import Session
from .sources import Shares, Source

#: How long an event loop waits for an answer. Then the consumer blocks, as for any command.
POLL_SECONDS = 0.25

_NOTHING: Any = object()


class Request(NamedTuple):
    """A claim of `want` messages from one queue, in flight, with tags that follow `seen_tag`."""

    queue: str
    want: int
    seen_tag: int
    no_ack: bool
    #: When it was made, by the monotonic clock.
    made_at: float
    asked: tuple[float, float]
    #: The arguments of `Store.deliver`.
    given: dict[str, Any]

    @property
    def last_tag(self) -> int:
        """The last tag of the messages that it may have brought."""
        return self.seen_tag + self.want

    @property
    def unbegun(self) -> list[Unbegun]:
        """The messages that it may have brought."""
        tags = range(self.seen_tag + 1, self.last_tag + 1)
        return [Unbegun(self.queue, tag, self.given["gate"] is not None) for tag in tags]


class Pending:
    """A claim whose answer has not been taken in. The consumer does other things meanwhile."""

    def __init__(self, source: Source, shares: Shares, request: Request, now: float) -> None:
        self.source = source
        #: The next claims, and their numbers of messages.
        self.shares = shares
        self.request = request
        self.sent_at = now
        #: When the consumer begins to block for the answer, by the monotonic clock.
        self.wait_at = now + POLL_SECONDS
        #: Whether its answer has come, or never will: it was refused, or its outcome is unknown.
        self.has_ended = False
        #: The script's answer.
        self.answer: Any = _NOTHING

    @property
    def is_answered(self) -> bool:
        """Whether its answer has come."""
        return self.answer is not _NOTHING

    @property
    def delivered(self) -> Delivered | None:
        """The parsed answer; None if the lease was lost."""
        return delivered(self.answer, self.request.given["gate"])

    def send(self, store: Store) -> None:
        """Send it. Raises redis-py's connection errors."""
        store.post(*store.deliver_call(**self.request.given), self._lose, self._answered)

    def _answered(self, answer: Any) -> None:
        self.answer, self.has_ended = answer, True

    def _lose(self) -> None:
        self.has_ended = True


def may_go_on(session: Session, wanted: list[list[Source]]) -> bool:
    """Whether a consumer may work while claims are in flight: only if its tasks run elsewhere."""
    if not session.is_polled or session.runs_here:
        return False
    if session.store.cluster or session.qos.slots.shared.pools:
        return False
    return not any(source.no_ack for shards in wanted for source in shards)


def following(
    shares: Shares, claimed: int | None, sources: Mapping[str, Source]
) -> tuple[Source, int] | None:
    """The next source that is still consumed, and how many to claim; None if there is none."""
    try:
        source, want = shares.send(claimed)
        while sources.get(source.queue) is not source:
            source, want = shares.send(0)
    except StopIteration:
        return None
    return source, want
