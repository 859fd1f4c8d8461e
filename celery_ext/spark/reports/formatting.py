"""Numbers and times as people read them."""

from __future__ import annotations

from datetime import datetime

from kombu_delayed.message.durations import length_text


def duration(seconds: float | None) -> str:
    """A length of time that may be unknown."""
    return "n/a" if seconds is None else length_text(seconds)


def share(value: float | None) -> str:
    """A share in per cent. A small one is not shown as 0."""
    if value is None:
        return "n/a"
    return "< 0.01 %" if 0 < value < 0.0001 else f"{value:.2%}".replace("%", " %")


def number(value: float | None) -> str:
    """A number with separated thousands, and two decimals if it is not whole."""
    if value is None:
        return "n/a"
    return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"


def moment(time: datetime | None) -> str:
    return "n/a" if time is None else f"{time:%Y-%m-%d %H:%M:%S}"
