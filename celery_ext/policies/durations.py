"""Lengths of time as policies are given them: `"24h"`, `"1h30m"`, seconds, or a timedelta."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

from .policy import PolicyError

_UNITS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_SPAN = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def span_ms(what: str, given: Any) -> int:
    """Milliseconds, at least 1. Raises PolicyError that begins with `what`."""
    seconds: Any = None
    if isinstance(given, timedelta):
        seconds = given.total_seconds()
    elif isinstance(given, str) and (found := _SPAN.fullmatch(given)) and given:
        parts = zip(found.groups(), _UNITS.values(), strict=True)
        seconds = sum(int(count) * size for count, size in parts if count)
    elif isinstance(given, (int, float)) and not isinstance(given, bool):
        seconds = given
    if seconds is None or not 0.001 <= seconds <= 10 * 366 * 86_400:
        raise PolicyError(
            f'{what} takes a length of time such as "24h", "1h30m", 90 (seconds) or a timedelta, '
            f"not {given!r}"
        )
    return round(seconds * 1000)


def span_text(ms: int) -> str:
    """The same in words as short as they go: `1h30m`."""
    seconds, text = ms // 1000, ""
    for unit, size in _UNITS.items():
        count, seconds = divmod(seconds, size)
        text += f"{count}{unit}" if count else ""
    return text or f"{ms / 1000:g}s"
