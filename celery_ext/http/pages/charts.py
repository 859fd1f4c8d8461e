"""Charts as numbers for SVG: the templates draw them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log10

#: The size of a chart in its own units; it is stretched over the page.
WIDTH, HEIGHT = 1000, 100


@dataclass(frozen=True)
class Bar:
    """A bar in the units of a chart."""

    x: float
    y: float
    width: float
    height: float
    value: float


@dataclass(frozen=True)
class Chart:
    """Bars, or the points of a line, and the scale: the values of its marks from the bottom up."""

    bars: Sequence[Bar]
    points: str
    scale: Sequence[float]

    @property
    def top(self) -> float:
        return self.scale[-1]


def nice(value: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, … that is at least a value; 1 for 0."""
    if value <= 0:
        return 1
    unit = 10.0 ** floor(log10(value))
    return next(step * unit for step in (1, 2, 5, 10) if step * unit >= value)


def _scale(values: Sequence[float]) -> list[float]:
    top = nice(max(values, default=0))
    return [0, top / 2, top]


def bars(values: Sequence[float]) -> Chart:
    """Bars side by side; a value above 0 is always visible."""
    scale = _scale(values)
    step = WIDTH / max(len(values), 1)
    found = []
    for place, value in enumerate(values):
        height = max(HEIGHT * value / scale[-1], 1.5) if value else 0
        found.append(
            Bar(
                round(place * step + step * 0.1, 2),
                round(HEIGHT - height, 2),
                round(step * 0.8, 2),
                round(height, 2),
                value,
            )
        )
    return Chart(found, "", scale)


def line(values: Sequence[float], top: float | None = None) -> Chart:
    """The points of a line; `top` is the end of the scale, if another line determines it."""
    scale = _scale(values) if top is None else [0, top / 2, top]
    step = WIDTH / max(len(values) - 1, 1)
    points = (
        f"{place * step:.1f},{HEIGHT - HEIGHT * value / scale[-1]:.1f}"
        for place, value in enumerate(values)
    )
    return Chart([], " ".join(points), scale)
