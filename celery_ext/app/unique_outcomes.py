"""Reports the outcomes of messages with a unique key to the code that sends them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from kombu_delayed.store.store import UniqueOutcome, unique_listeners


class Sent(NamedTuple):
    """A message with a unique key, and its outcome."""

    queue: str
    id: str
    outcome: UniqueOutcome


_heard: ContextVar[list[Sent] | None] = ContextVar("heard", default=None)


@contextmanager
def hearing(alone: bool = False) -> Iterator[list[Sent]]:
    """Collect the messages that are sent meanwhile in this thread or greenlet.

    A `hearing` around this one gets them too, unless this one is `alone`: another app sends them.
    """
    own: list[Sent] = []
    outer, token = None if alone else _heard.get(), _heard.set(own)
    try:
        yield own
    finally:
        _heard.reset(token)
        if outer is not None:
            outer += own


def was_pushed(id: str) -> bool:
    """Returns whether a message just sent was not stored, as another one waits in its place."""
    return any(sent.id == id and sent.outcome.done == "pushed" for sent in _heard.get() or ())


def _on_unique(queue: str, id: str, outcome: UniqueOutcome) -> None:
    heard = _heard.get()
    if heard is not None:
        heard.append(Sent(queue, id, outcome))


unique_listeners.append(_on_unique)
