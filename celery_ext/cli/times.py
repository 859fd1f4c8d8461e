"""Times and lengths of time as users type them."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from math import isnan
from typing import Any

import click

from kombu_delayed.message.durations import ANY, PERIOD, Bounds, has_unit, parse_length
from kombu_delayed.message.envelope import parse_iso8601


class Span(click.ParamType):  # type: ignore[type-arg]
    """A length of time."""

    name = "span"

    def __init__(self, within: Bounds = ANY) -> None:
        self._within = within

    def convert(self, value: Any, param: Any, ctx: Any) -> timedelta:
        try:
            return parse_length(value, self._within)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class NumberRange(click.FloatRange):
    """Numbers within bounds, which NaN is not."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        found = float(super().convert(value, param, ctx))
        if isnan(found):
            self.fail(f"{value!r} is not a number", param, ctx)
        return found


class Time(click.ParamType):  # type: ignore[type-arg]
    """A time, in ISO 8601 or counted from now."""

    name = "time"

    def convert(self, value: Any, param: Any, ctx: Any) -> datetime:
        if isinstance(value, datetime):
            return value
        now = datetime.now(timezone.utc)
        try:
            if value.strip().lower() == "now":
                return now
            # Without a unit it may be a date: 20310203.
            at = now + parse_length(value) if has_unit(value) else parse_iso8601(value)
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
#: How long something lasts.
LASTING = Span(PERIOD)
