"""Numbers and times as people read them."""

from __future__ import annotations

from datetime import datetime

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"))


def duration(seconds: float | None) -> str:
    """A length of time in at most two units: 12 ms, 3.5 s, 2 min 5 s, 1 d 4 h."""
    if seconds is None:
        return "n/a"
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    units = (*_UNITS, (1, "s"))
    at = next(n for n, (length, _) in enumerate(units) if seconds >= length)
    (large, name), (small, smaller) = units[at], units[at + 1]
    whole, rest = divmod(round(seconds / small), large // small)
    return f"{whole} {name}" + (f" {rest} {smaller}" if rest else "")


def share(value: float | None) -> str:
    """A share in per cent; a small one is not shown as none."""
    if value is None:
        return "n/a"
    return "< 0.01 %" if 0 < value < 0.0001 else f"{value:.2%}".replace("%", " %")


def number(value: float | None) -> str:
    """A number with its thousands apart; two decimals where it is not whole."""
    if value is None:
        return "n/a"
    return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"


def moment(time: datetime | None) -> str:
    """A time to the second."""
    return "n/a" if time is None else f"{time:%Y-%m-%d %H:%M:%S}"
