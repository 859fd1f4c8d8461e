"""Times and spans as they are typed."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from typing import Any

import click

from kombu_delayed.message import parse_iso8601

_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}

_SPAN = re.compile(r"([+-]?)((?:\d+(?:\.\d+)?[smhdw])+)")

_PART = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")


def read_span(text: str) -> timedelta | None:
    """`90s`, `+2h`, `3d`, `1h30m`, `-15m`; None: it is no span. Raises OverflowError."""
    found = _SPAN.fullmatch(text.strip().lower())
    if found is None:
        return None
    seconds = sum(float(count) * _SECONDS[unit] for count, unit in _PART.findall(found[2]))
    return timedelta(seconds=-seconds if found[1] == "-" else seconds)


class Span(click.ParamType):  # type: ignore[type-arg]
    """A length of time."""

    name = "span"

    def convert(self, value: Any, param: Any, ctx: Any) -> timedelta:
        """Read it, or fail as click does."""
        if isinstance(value, timedelta):
            return value
        try:
            length = read_span(value)
        except OverflowError:
            length = None
        if length is None:
            problem = f"{value!r} is not a length of time, such as 90s, 30m, 2h, 1h30m or 3d"
            self.fail(problem, param, ctx)
        return length


class Time(click.ParamType):  # type: ignore[type-arg]
    """A time, in ISO 8601 or counted from now."""

    name = "time"

    def convert(self, value: Any, param: Any, ctx: Any) -> datetime:
        """Read it, or fail as click does."""
        if isinstance(value, datetime):
            return value
        now = datetime.now(timezone.utc)
        try:
            if value.strip().lower() == "now":
                return now
            length = read_span(value)
            at = parse_iso8601(value) if length is None else now + length
        except (ValueError, OverflowError):
            self.fail(
                f"{value!r} is not a time: give ISO 8601, such as "
                f"{now.isoformat(timespec='seconds')}, or count from now, such as +2h, 3d or -15m",
                param,
                ctx,
            )
        return at if at.tzinfo else at.replace(tzinfo=timezone.utc)


TIME = Time()
SPAN = Span()
