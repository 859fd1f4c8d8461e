"""Lengths of time, rates and sizes as people write them."""

from __future__ import annotations

import re
from datetime import timedelta

_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}

_SPAN = re.compile(r"([+-]?)((?:\d+(?:\.\d+)?[smhdw])+)")

_PART = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")

_RATE = re.compile(r"(\d+(?:\.\d+)?)([kM]?)(?:/([smhd]))?")

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kKMGT])(i?)B?|B)?")

_POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


def read_span(text: str) -> timedelta | None:
    """`90s`, `+2h`, `3d`, `1h30m`, `-15m`; None: it is no span. Raises OverflowError."""
    found = _SPAN.fullmatch(text.strip().lower())
    if found is None:
        return None
    seconds = sum(float(count) * _SECONDS[unit] for count, unit in _PART.findall(found[2]))
    return timedelta(seconds=-seconds if found[1] == "-" else seconds)


def read_rate(text: str) -> float | None:
    """How many a second: `500/s`, `30k/m`, `2.5M/d`, `500`; None: it is no rate."""
    found = _RATE.fullmatch(text.strip().replace(",", ""))
    if found is None:
        return None
    return float(found[1]) * 1000.0 ** _POWERS[found[2]] / _SECONDS[found[3] or "s"]


def read_size(text: str) -> float | None:
    """Bytes: `300`, `300 B`, `2kB` (2,000), `16GiB` (of 2**30); None: it is no size."""
    found = _SIZE.fullmatch(text.strip().replace(",", ""))
    if found is None:
        return None
    return float(found[1]) * (1024.0 if found[3] else 1000.0) ** _POWERS[found[2] or ""]
