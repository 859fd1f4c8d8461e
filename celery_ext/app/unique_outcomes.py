"""What became of messages with a unique key, for who sends them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from kombu_delayed.store.store import UniqueOutcome, unique_listeners


class Sent(NamedTuple):
    """A message with a unique key, and what became of it."""

    queue: str
    id: str
    outcome: UniqueOutcome


_heard: ContextVar[list[Sent] | None] = ContextVar("heard", default=None)


@contextmanager
def hearing(alone: bool = False) -> Iterator[list[Sent]]:
    """Those that are sent meanwhile, in this thread or greenlet.

    Who hears around it does too, unless it hears `alone`: what another app sends.
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
    """Whether a message that has just been sent was not stored, as another one waits for it."""
    return any(sent.id == id and sent.outcome.done == "pushed" for sent in _heard.get() or ())


def _on_unique(queue: str, id: str, outcome: UniqueOutcome) -> None:
    heard = _heard.get()
    if heard is not None:
        heard.append(Sent(queue, id, outcome))


unique_listeners.append(_on_unique)
