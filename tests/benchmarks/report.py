"""Benchmarks and their rows: on the terminal and as a page of the documentation."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from rich.table import Table

#: The figures of a measurement, by name; also the medians of several.
Figures = dict[str, float]
#: A text with figures in braces, or a function of them.
Text = str | Callable[[Figures], str]
Measure = TypeVar("Measure", bound=Callable[..., Figures])

NOTHING = "-"


@dataclass(frozen=True)
class Row:
    what: str
    target: str
    stock: str
    ours: str
    ratio: str
    reached: bool | None


@dataclass(frozen=True)
class Line:
    """A row without its figures. Those of the stock transport begin with `stock_`.

    `ratio`: two figures, of which the first is divided by the second.
    """

    what: Text
    ours: Text
    target: Text = NOTHING
    ratio: Text | tuple[str, str] = NOTHING
    reached: Callable[[Figures], bool] | None = None
    stock: Text = NOTHING

    def row(self, found: Figures) -> Row:
        def made(text: Text) -> str:
            return text.format_map(found) if isinstance(text, str) else text(found)

        ratio = self.ratio
        if isinstance(ratio, tuple):
            ratio = f"{found[ratio[0]] / found[ratio[1]]:.2f}"
        texts = map(made, (self.what, self.target, self.stock, self.ours, ratio))
        return Row(*texts, None if self.reached is None else self.reached(found))


def at_least(what: str, factor: float) -> Line:
    """The target is that the figure `rate` is `factor` times that of stock."""
    return Line(
        what,
        "{rate:,.0f}/s",
        f"≥ {factor:.1f} × stock",  # noqa: RUF001
        ("rate", "stock_rate"),
        lambda f: f["rate"] / f["stock_rate"] >= factor,
        "{stock_rate:,.0f}/s",
    )


@dataclass(frozen=True)
class Benchmark:
    """`measure` is called with a rig."""

    name: str
    measure: Callable[..., Figures]
    lines: tuple[Line, ...]
    sides: tuple[str, ...]
    #: The number of rounds, at most, for long measurements that do not vary.
    rounds: int | None
    #: The kind of server, as known to `tests.kit.servers`.
    server: str

    def rows(self, found: dict[str, Sequence[Figures]]) -> list[Row]:
        figures = medians(found["ours"])
        if "stock" in found:
            figures |= {f"stock_{name}": each for name, each in medians(found["stock"]).items()}
        return [line.row(figures) for line in self.lines]


BENCHMARKS: dict[str, Benchmark] = {}


def benchmark(
    name: str,
    *lines: Line,
    stock: bool = False,
    rounds: int | None = None,
    server: str = "valkey",
) -> Callable[[Measure], Measure]:
    """Make a function a benchmark; with `stock`, of the stock transport, too."""
    sides = ("stock", "ours") if stock else ("ours",)

    def register(measure: Measure) -> Measure:
        BENCHMARKS[name] = Benchmark(name, measure, lines, sides, rounds, server)
        return measure

    return register


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


PAGE = """\
# Benchmarks

Measured on one machine, server and clients together, over loopback TCP. *Stock* is \
Kombu's `redis://`, *ours* is `delayed+redis://`,
in turn on fresh servers of the same kind. Each figure is the median of {rounds} (one, where a run \
is long).
{scale}
| what | to reach | stock | ours | ratio | |
|---|---|---|---|---|---|
{rows}

{peers}{circumstances}

To measure again:

```
{command}
```
"""


def as_page(
    rows: Sequence[Row], server: str, rounds: int, command: str, quick: bool, peers: str = ""
) -> str:
    """The page docs/benchmarks.md; `peers` is the table of other systems."""
    scale = "\nTaken at the small scale of `--quick`: for trying the tool, not for comparing.\n"
    cells = ((r.what, r.target, r.stock, r.ours, r.ratio, _word(r)) for r in rows)
    return PAGE.format(
        rounds=f"{rounds} round{'s' * (rounds > 1)}",
        scale=scale if quick else "",
        rows="\n".join(f"| {' | '.join(each)} |" for each in cells),
        peers=f"## Other systems\n\n{peers}\n" if peers else "",
        circumstances=circumstances(server),
        command=command,
    )


def circumstances(server: str) -> str:
    """A list of the circumstances that affect a measurement."""
    versions = ""
    for name in ("kombu-delayed", "celery", "kombu", "redis", "hiredis"):
        with suppress(ImportError):
            versions += f", {name} {version(name)}"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = named[0] if named else platform.processor() or platform.machine()
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"""\
- Date: {date.today().isoformat()}
- Machine: {processor}, {os.cpu_count()} cores, {memory_bytes / 2**30:.0f} GiB, \
{platform.system()} {platform.release().split("-")[0]}
- Server: {server}
- Python {platform.python_version()}{versions}"""
