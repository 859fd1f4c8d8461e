"""Plots of a report, as inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from io import StringIO
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from .formatting import duration

Row = dict[str, Any]

#: One colour for each percentile, and one for counts.
COLOURS = {"p50_seconds": "#5b8c5a", "p95_seconds": "#e0a458", "p99_seconds": "#c8553d"}
COUNTS = "#4c6a92"

STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kombu-delayed",
    "font.family": "sans-serif",
    "font.sans-serif": ["system-ui", "DejaVu Sans"],
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "date.converter": "concise",
}

#: The colour of texts and lines. It is replaced by the page's text colour, light or dark.
_INK = "#123456"

_ON_PAGE: Any = {
    **STYLE,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK
    ),
    "grid.color": "#80808055",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}

#: The most workers in a plot.
MOST_WORKERS = 60

#: Where the logarithmic axis of lateness begins.
_LEAST_SECONDS = 0.01

#: Formatters of axes.
DURATIONS = FuncFormatter(lambda value, _: duration(value))
NUMBERS = FuncFormatter(lambda value, _: f"{value:,.0f}")


def _count(axis: Any) -> None:
    axis.set_major_locator(MaxNLocator("auto", integer=True))
    axis.set_major_formatter(NUMBERS)


def _svg(figure: Figure) -> str:
    text = StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    _, svg, rest = text.getvalue().partition("<svg")
    return (svg + rest).replace(_INK, "currentColor")


def lateness_over_time(parts: Sequence[Row], length: timedelta, target_seconds: float) -> str:
    with matplotlib.rc_context(_ON_PAGE):
        figure = Figure(figsize=(9, 3.2), layout="constrained")
        axes = figure.subplots()
        times = [row["part"] for row in parts]
        axes.set_xlim(times[0] - length, times[-1] + length)
        for name, colour in COLOURS.items():
            marks = [max(row[name], _LEAST_SECONDS) for row in parts]
            axes.plot(times, marks, color=colour, label=name[:3], marker="o", markersize=2.5)
        axes.axhline(target_seconds, color="#888888", linestyle="--", linewidth=1, label="target")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(DURATIONS)
        axes.yaxis.set_minor_formatter("")
        figure.legend(loc="outside upper left", ncols=4, frameon=False)
        return _svg(figure)


def load_over_time(parts: Sequence[Row], length: timedelta) -> str:
    """Deliveries per interval; missing intervals have none."""
    with matplotlib.rc_context(_ON_PAGE):
        figure = Figure(figsize=(9, 2.2), layout="constrained")
        axes = figure.subplots()
        times, counts = _steps([(row["part"], row["delivered"]) for row in parts], length)
        axes.set_xlim(times[0] - length, times[-1] + length)
        axes.fill_between(times, counts, step="post", color=COUNTS, alpha=0.35, linewidth=0)
        axes.plot(times, counts, drawstyle="steps-post", color=COUNTS)
        axes.set_ylim(bottom=0)
        _count(axes.yaxis)
        return _svg(figure)


def _steps(
    counted: Sequence[tuple[datetime, int]], length: timedelta
) -> tuple[list[Any], list[int]]:
    """The steps of a plot, which falls to 0 at a missing interval and at the end."""
    times: list[Any] = []
    counts: list[int] = []
    for at, count in counted:
        if times and times[-1] + length < at:
            times.append(times[-1] + length)
            counts.append(0)
        times.append(at)
        counts.append(count)
    return [*times, times[-1] + length], [*counts, 0]


def histogram(buckets: Sequence[Row], edges: Sequence[float]) -> str:
    counts = {row["at_least_seconds"]: row["messages"] for row in buckets}
    ends = [*map(duration, edges[1:]), "more"]
    labels = [f"< {end}" if end != "more" else end for end in ends]
    with matplotlib.rc_context(_ON_PAGE):
        figure = Figure(figsize=(9, 2.8), layout="constrained")
        axes = figure.subplots()
        bars = axes.bar(labels, [counts.get(edge, 0) for edge in edges], color=COUNTS)
        axes.bar_label(bars, fmt=lambda n: f"{n:,.0f}" if n else "", fontsize=8)
        _count(axes.yaxis)
        axes.tick_params(axis="x", labelsize=8)
        axes.grid(visible=False, axis="x")
        return _svg(figure)


def workers(rows: Sequence[Row]) -> str:
    """Deliveries by worker, the highest first; only the first and last of a long list."""
    shown = list(rows)
    if len(shown) > MOST_WORKERS:
        half = MOST_WORKERS // 2
        shown = shown[:half] + shown[-half:]
    with matplotlib.rc_context(_ON_PAGE):
        figure = Figure(figsize=(9, 0.6 + 0.24 * len(shown)), layout="constrained")
        axes = figure.subplots()
        # Matplotlib would read `$` as the start of a formula.
        names = [row["worker"].replace("$", r"\$") for row in shown]
        bars = axes.barh(range(len(shown)), [row["deliveries"] for row in shown], color=COUNTS)
        axes.set_yticks(range(len(shown)), names)
        axes.bar_label(bars, fmt=lambda n: f"{n:,.0f}", fontsize=8, padding=3)
        axes.invert_yaxis()
        _count(axes.xaxis)
        axes.grid(visible=False, axis="y")
        return _svg(figure)
