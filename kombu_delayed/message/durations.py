"""Parses and formats lengths of time, rates and sizes, the same everywhere.

A length of time is text such as `90s`, `1h30m`, `1.5h`, `2d`, `1w` or `100ms`, a number of seconds
(also as text), or a timedelta. A rate is text such as `10/s`, `1k/s`, `300/m` or `1000/2h`.
"""

from __future__ import annotations

import math
import re
from datetime import timedelta
from typing import Any, NamedTuple

_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}

_ONE = {f"1{unit}" for unit in _UNITS}

_NUMBER, _UNIT = r"\d+(?:\.\d+)?", r"ms|[smhdw]"

_PART = re.compile(rf"({_NUMBER})({_UNIT})\s*")

_LENGTH = re.compile(rf"([+-]?)(?:({_NUMBER})|(?:{_NUMBER}(?:{_UNIT})\s*)+)")

# Very small and very large numbers are written with an exponent, as in `1e-05/s`.
_RATE = re.compile(rf"({_NUMBER}(?:e[+-]?\d+)?)([kM]?)(?:/({_NUMBER})?({_UNIT}))?")

_SIZE = re.compile(rf"({_NUMBER}) ?(?:([kKMGT])(i?)B?|B)?")

_POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}

Bounds = tuple[timedelta, timedelta]

#: The range of a timedelta.
ANY: Bounds = (timedelta(days=-999_999_999), timedelta(days=999_999_999))

#: The range of a policy, a timeout or the period of a rate.
PERIOD: Bounds = (timedelta(milliseconds=1), timedelta(days=10 * 366))


def parse_length(given: Any, within: Bounds = ANY) -> timedelta:
    """Parse a length of time, maybe negative. Raises ValueError, which begins with the value."""
    seconds = _seconds(given)
    shortest, longest = (each.total_seconds() for each in within)
    if seconds is not None and shortest <= seconds <= longest:
        return timedelta(seconds=seconds)
    bounds = f" from {length_text(shortest)} to {length_text(longest)}"
    raise ValueError(
        f"{_shown(given)} is not a length of time{'' if seconds is None else bounds}: "
        "give seconds, such as 90, or text such as 90s, 1h30m, 2d or 100ms"
    )


def _seconds(given: Any) -> float | None:
    if isinstance(given, timedelta):
        return given.total_seconds()
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return given
    text = given.strip().lower() if isinstance(given, str) else ""
    found = _LENGTH.fullmatch(text)
    if found is None:
        return None
    parts = [(found[2], "s")] if found[2] else _PART.findall(text)
    seconds = sum(float(count) * _UNITS[unit] for count, unit in parts)
    return -seconds if found[1] == "-" else seconds


def has_unit(text: str) -> bool:
    """Whether text ends with a unit of time, unlike a number alone."""
    return text.strip().lower().endswith(tuple(_UNITS))


def parse_ms(given: Any) -> int:
    """Parse a length of time within PERIOD, in ms. Raises ValueError as `parse_length`."""
    return round(parse_length(given, PERIOD).total_seconds() * 1000)


def length_text(seconds: float) -> str:
    """A length of time for people, in its two largest units: `3d 4h`, `12.5s`, `40ms`, `-2m 5s`.

    It is truncated, not rounded, so that less than a minute is never shown as a minute.
    """
    ms = round(abs(seconds) * 1000)
    sign = "-" if seconds < 0 < ms else ""
    if 0 < ms < 1000:
        return f"{sign}{ms}ms"
    return sign + _joined(_parts(ms - ms % (100 if ms < 60_000 else 1000))[:2], " ")


def exact_text(ms: int) -> str:
    """A length of time without loss, in a form that can be parsed: `1h30m`, `0.5s`."""
    return _joined(_parts(ms), "")


def _parts(ms: int) -> list[tuple[float, str]]:
    """The counts from the largest unit that fits down to seconds, including zeros between."""
    parts: list[tuple[float, str]] = []
    for unit, size_ms in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000)):
        count, ms = divmod(ms, size_ms)
        if parts or count:
            parts.append((count, unit))
    return [*parts, (ms / 1000, "s")]


def _joined(parts: list[tuple[float, str]], between: str) -> str:
    return between.join(f"{count:.15g}{unit}" for count, unit in parts if count) or "0s"


class Rate(NamedTuple):
    """`number` of something in each period. As text: `100/m`, `1000/2h`."""

    number: float
    period_ms: int

    def __str__(self) -> str:
        period = exact_text(self.period_ms)
        return f"{self.number:.15g}/{period[1:] if period in _ONE else period}"

    @property
    def every_ms(self) -> float:
        """The time between two events in ms."""
        return self.period_ms / self.number

    @property
    def per_second(self) -> float:
        """The number per second."""
        return self.number / (self.period_ms / 1000)


def parse_rate(given: Any) -> Rate:
    """Parse a rate of at least one in 3660d, per second by default. Raises ValueError."""
    found = _RATE.fullmatch(given.strip().replace(",", "")) if isinstance(given, str) else None
    count = float(found[1]) * 1000.0 ** _POWERS[found[2]] if found else 0
    if found is None or not 0 < count < math.inf:
        raise ValueError(_not_a_rate(given))
    try:
        rate = Rate(count, parse_ms(f"{found[3] or 1}{found[4] or 's'}"))
    except ValueError as error:
        raise ValueError(f"{_not_a_rate(given)}; of its time, {error}") from error
    if rate.every_ms > PERIOD[1].total_seconds() * 1000:  # servers keep no longer times of tokens
        raise ValueError(_not_a_rate(given, "of at least one in 3660d"))
    return rate


def _not_a_rate(given: Any, bound: str = "above 0") -> str:
    return f"{_shown(given)} is not a rate {bound}: give text such as 5/s, 1k/s, 100/m or 1000/2h"


def parse_size(text: str) -> float:
    """Parse a size in bytes: `300`, `300 B`, `2kB` (2,000), `16GiB` (2**30). Raises ValueError."""
    found = _SIZE.fullmatch(text.strip().replace(",", ""))
    if found is None:
        raise ValueError(f"{_shown(text)} is not a size: give text such as 300, 2kB or 64KiB")
    return float(found[1]) * (1024.0 if found[3] else 1000.0) ** _POWERS[found[2] or ""]


def _shown(given: Any) -> str:
    text = repr(given)
    return text if len(text) <= 60 else f"{text[:59]}…"
