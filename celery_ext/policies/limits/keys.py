"""Reads from a message what policies need: a key, a number, or yes or no."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...tasks.body import CELERY_HEADERS
from ..message import Message
from ..policy import PolicyError

#: The name of a header or a keyword argument, or a function of the message.
By = str | Callable[[Message], Any]


def checked_by(what: str, by: Any) -> By:
    """Raises PolicyError that begins with `what` if `by` is neither a name nor a function."""
    if not (callable(by) or (isinstance(by, str) and by)):
        raise PolicyError(
            f"{what} takes the name of a header or a keyword argument, or a function, not {by!r}"
        )
    return by


def by_text(by: str | Callable[..., Any] | None) -> str:
    if by is None:
        return ""
    return by if isinstance(by, str) else str(getattr(by, "__qualname__", type(by).__qualname__))


def value_of(by: By, message: Message) -> Any:
    """Return the header or keyword argument, or the function's result; None if there is none.

    An argument takes precedence over a header of the same name that every task has.
    """
    if callable(by):
        return by(message)
    if by in message.headers and by not in CELERY_HEADERS:
        return message.headers[by]
    return message.kwargs.get(by, message.headers.get(by))


def key_of(by: By | None, message: Message) -> str:
    value = None if by is None else value_of(by, message)
    return "" if value is None else str(value)
