"""A picture of a simulation: how late messages are, and what they take in Redis, over time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MultipleLocator, NullLocator

from kombu_delayed.errors import OptionError

from ..reports.plots import COLOURS, COUNTS, DURATIONS, NUMBERS, STYLE
from .timeline import Point

Row = dict[str, Any]

_HOUR_SECONDS = 3600

#: Where the logarithmic axis of lateness begins.
_LEAST_SECONDS = 0.001

#: The marks on the axis of lateness.
_MARKS_SECONDS = (0.001, 0.01, 0.1, 1, 10, 60, 600, 3600, 36_000, 86_400, 864_000)

_GIB = 2**30


def check_file(path: Path) -> None:
    """Raises OptionError where no picture can be written."""
    kind = path.suffix.removeprefix(".").lower()
    if kind and kind not in Figure().canvas.get_supported_filetypes():
        raise OptionError(f"a picture is .svg, .png or .pdf, not {path.suffix}: {path}")
    if not os.access(path.absolute().parent, os.W_OK):
        raise OptionError(f"{path} cannot be written: its directory is not there, or protected")


def save(path: str, points: Sequence[Point], windows: Sequence[Row]) -> None:
    """Draw lateness by the due time, rates and memory into a file: .svg, .png, .pdf.

    `windows` have begin_seconds, p50_seconds and p99_seconds.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 7), layout="constrained")
        lateness, rates, memory = figure.subplots(3, sharex=True, height_ratios=(3, 2, 2))
        hours = [point.at_seconds / _HOUR_SECONDS for point in points]
        _lateness(lateness, windows)
        _rates(rates, hours, points)
        _memory(memory, hours, points)
        memory.set_xlim(0, hours[-1])
        memory.set_xlabel("hours from the beginning")
        if 12 <= hours[-1] <= 36:
            memory.xaxis.set_major_locator(MultipleLocator(2))
        figure.savefig(path, dpi=90)


def _lateness(axes: Any, windows: Sequence[Row]) -> None:
    ordered = sorted(windows, key=lambda row: row["begin_seconds"])
    times = [row["begin_seconds"] / _HOUR_SECONDS for row in ordered]
    for name in ("p50_seconds", "p99_seconds"):
        marks = [max(row[name], _LEAST_SECONDS) for row in ordered]
        axes.plot(times, marks, color=COLOURS[name], label=name[:3], marker="o", markersize=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(FixedLocator(_MARKS_SECONDS))
    axes.yaxis.set_major_formatter(DURATIONS)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_title("lateness, by the due time", loc="left", fontsize=9)
    axes.legend(frameon=False, ncols=2, loc="upper right")


def _rates(axes: Any, hours: Sequence[float], points: Sequence[Point]) -> None:
    axes.plot(hours, [point.due_rate for point in points], color="#aaaaaa", label="due")
    axes.plot(hours, [point.start_rate for point in points], color=COUNTS, label="started")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(NUMBERS)
    axes.set_title("messages a second", loc="left", fontsize=9)
    axes.legend(frameon=False, ncols=2, loc="upper right")


def _memory(axes: Any, hours: Sequence[float], points: Sequence[Point]) -> None:
    waiting = [point.delayed + point.ready for point in points]
    each = [
        point.memory_bytes / _GIB / count if count else 0.0
        for point, count in zip(points, waiting, strict=True)
    ]
    delayed = [point.delayed * size for point, size in zip(points, each, strict=True)]
    ready = [point.ready * size for point, size in zip(points, each, strict=True)]
    colours = (COUNTS, COLOURS["p99_seconds"])
    axes.stackplot(hours, delayed, ready, colors=colours, labels=("delayed", "ready"), alpha=0.7)
    axes.set_ylim(bottom=0)
    axes.set_title("GiB in Redis", loc="left", fontsize=9)
    axes.legend(frameon=False, ncols=2, loc="upper right")
