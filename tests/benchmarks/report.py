"""Rows of results: on the terminal and as a page of the documentation."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

from rich.table import Table

#: What one measurement found, by name; and the medians of several.
Figures = dict[str, float]

NOTHING = "-"


@dataclass(frozen=True)
class Row:
    what: str
    target: str
    stock: str
    ours: str
    ratio: str = NOTHING
    reached: bool | None = None


@dataclass(frozen=True)
class Benchmark:
    """`measure` is called with a rig; `rows` with the medians of each side that was measured."""

    name: str
    measure: Callable[..., Figures]
    rows: Callable[..., list[Row]]
    sides: tuple[str, ...] = ("stock", "ours")
    #: Rounds at most, for what is long and does not vary.
    rounds: int | None = None
    #: The kind of server, as `tests.kit.servers` knows them.
    server: str = "valkey"


def at_least(what: str, figure: str, factor: float, unit: str = "/s") -> Callable[..., list[Row]]:
    """Rows for a rate that is to be `factor` times stock's."""

    def rows(stock: Figures, ours: Figures) -> list[Row]:
        ratio = ours[figure] / stock[figure]
        return [
            Row(
                what,
                f"≥ {factor:.1f} × stock",  # noqa: RUF001
                f"{stock[figure]:,.0f}{unit}",
                f"{ours[figure]:,.0f}{unit}",
                f"{ratio:.2f}",
                ratio >= factor,
            )
        ]

    return rows


def medians(rounds: Sequence[Figures]) -> Figures:
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def as_table(rows: Sequence[Row], title: str) -> Table:
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("what", ratio=3)
    table.add_column("to reach", ratio=1)
    for column in ("stock", "ours", "ratio"):
        table.add_column(column, ratio=1, justify="right")
    table.add_column("", no_wrap=True)
    for row in rows:
        colour = {True: "green", False: "red", None: ""}[row.reached]
        cells = (row.what.replace("`", ""), row.target, row.stock, row.ours, row.ratio)
        table.add_row(*cells, _word(row), style=colour)
    return table


def _word(row: Row) -> str:
    return {True: "reached", False: "missed", None: ""}[row.reached]


def as_page(rows: Sequence[Row], server: str, rounds: int, command: str, quick: bool) -> str:
    """The page docs/benchmarks.md."""
    scale = "\nTaken at the small scale of `--quick`: for trying the tool, not for comparing.\n"
    lines = [
        "# Benchmarks",
        "",
        "Measured on one machine, server and clients together, over loopback TCP. *Stock* is "
        "Kombu's `redis://`, *ours* is `delayed+redis://`,",
        f"in turn on fresh servers of the same kind. Each figure is the median of {rounds} "
        f"round{'s' * (rounds > 1)} (one, where a run is long).",
        scale if quick else "",
        "| what | to reach | stock | ours | ratio | |",
        "|---|---|---|---|---|---|",
        *(
            f"| {row.what} | {row.target} | {row.stock} | {row.ours} | {row.ratio} | {_word(row)} |"
            for row in rows
        ),
        "",
        *(f"- {line}" for line in _circumstances(server)),
        "",
        "To measure again:",
        "",
        "```",
        command,
        "```",
        "",
    ]
    return "\n".join(lines)


def _circumstances(server: str) -> list[str]:
    names = ("kombu-delayed", "celery", "kombu", "redis", "hiredis")
    versions = ", ".join(f"{name} {found}" for name in names if (found := _version(name)))
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return [
        f"Date: {date.today().isoformat()}",
        f"Machine: {_processor()}, {os.cpu_count()} cores, {memory_bytes / 2**30:.0f} GiB, "
        f"{platform.system()} {platform.release().split('-')[0]}",
        f"Server: {server}",
        f"Python {platform.python_version()}, {versions}",
    ]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except ImportError:
        return None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
