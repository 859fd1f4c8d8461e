"""Parses times and lengths of time that users give."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

from kombu_delayed.message.clock import now_ms
from kombu_delayed.message.durations import parse_length, parse_ms
from kombu_delayed.message.envelope import eta_to_ms

from ..errors import QueryError

#: Seconds, text such as "90s", or a timedelta.
Length = float | str | timedelta

#: The time limit of our own tasks, which end without it. With 0, a pool's own limit would apply.
OWN_LIMIT_SECONDS = 86_400

EPOCH = datetime.fromtimestamp(0, timezone.utc)

#: The last due time that a datetime can represent.
LATEST_MS = (datetime.max.replace(tzinfo=timezone.utc) - EPOCH) // timedelta(milliseconds=1)


def to_ms(name: str, value: datetime | str) -> int:
    """Milliseconds since the epoch. Raises QueryError with `name` if it is not a time."""
    try:
        return eta_to_ms(value)
    except (ValueError, TypeError, OverflowError) as error:
        example = datetime.now(timezone.utc).isoformat(timespec="seconds")
        raise QueryError(
            f"{name}={value!r} is not a time: give a datetime or ISO 8601, such as {example}"
        ) from error


def from_now_ms(name: str, seconds: float) -> int:
    """The time some seconds from now, in ms since the epoch. Raises QueryError like `to_ms`."""
    try:
        return eta_to_ms(datetime.now(timezone.utc) + timedelta(seconds=seconds))
    except (ValueError, TypeError, OverflowError) as error:
        raise QueryError(
            f"{name}={seconds!r} is not a time from now: give a number of seconds, such as 90"
        ) from error


def ms_until(when: Any) -> int:
    """The time until a retry in ms, from `when` of Celery's `Retry`: a time, or seconds from now.

    It is negative for a time in the past, and 0 for anything else, which Celery retries at once.
    """
    try:
        is_time = isinstance(when, (str, datetime))
        return eta_to_ms(when) - now_ms() if is_time else int(when * 1000)
    except (TypeError, ValueError, OverflowError):
        return 0


def to_length(name: str, given: Length | None) -> timedelta | None:
    """A length of time, which may be negative. Raises QueryError like `to_ms`."""
    try:
        return None if given is None else parse_length(given)
    except ValueError as error:
        raise QueryError(f"{name}={error}") from None


def length_ms(name: str, given: Length) -> int:
    """A length of time in ms. Raises QueryError like `to_ms`."""
    try:
        return parse_ms(given)
    except ValueError as error:
        raise QueryError(f"{name}={error}") from error


def from_ms(due_ms: int) -> datetime:
    """A time in UTC, or the nearest one that a datetime can represent."""
    return EPOCH + timedelta(milliseconds=min(max(due_ms, 0), LATEST_MS))


def shifted(at: datetime, by: timedelta) -> datetime:
    """A time moved by a length of time, or the nearest one that `from_ms` can return."""
    return from_ms(eta_to_ms(at) + by // timedelta(milliseconds=1))


def info_data(info: Any) -> dict[str, Any]:
    """All fields of a dataclass, in types that JSON can represent."""
    return {name: _plain(value) for name, value in vars(info).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, tuple):
        return [info_data(each) for each in value]
    return value
