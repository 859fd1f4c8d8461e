"""Measure this transport beside the stock one: `python -m tests.benchmarks [NAME …]`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import click
import pytest
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from tests.benchmarks import (
    backlog,
    bookkeeping,
    bulk,
    bursts,
    events,
    gates,
    http,
    idle,
    lateness,
    many_queues,
    memory,
    metrics,
    pages,
    publishing,
    recovery,
    replication,
    shards,
    shards_cluster,
    shutdown,
    sizing,
    spark,
    spark_archive,
    spark_million,
    spark_simulate,
    switching,
    throughput,
    waking,
)
from tests.benchmarks.report import Benchmark, Figures, Row, as_page, as_table, medians
from tests.benchmarks.rig import rig

GROUPS = (
    publishing,
    throughput,
    lateness,
    many_queues,
    bursts,
    bookkeeping,
    backlog,
    idle,
    memory,
    metrics,
    recovery,
    shutdown,
    bulk,
    events,
    gates,
    http,
    pages,
    replication,
    shards,
    shards_cluster,
    waking,
    sizing,
    spark,
    spark_archive,
    spark_million,
    spark_simulate,
    switching,
)
BENCHMARKS: dict[str, Benchmark] = {each.name: each for g in GROUPS for each in g.BENCHMARKS}


class Run:
    """Runs benchmarks one after the other and gathers their rows."""

    def __init__(self, console: Console, rounds: int, quick: bool) -> None:
        self.console = console
        self.rounds = rounds
        self.quick = quick
        self.server = ""
        self.failed: list[str] = []

    def run(self, chosen: Sequence[Benchmark]) -> list[Row]:
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        rows: list[Row] = []
        with Progress(*columns, console=self.console, refresh_per_second=2) as progress:
            for benchmark in chosen:
                task = progress.add_task(benchmark.name)
                rows += self._rows(benchmark, partial(_describe, progress, task))
                progress.remove_task(task)
        return rows

    def _rows(self, benchmark: Benchmark, say: Callable[[str], None]) -> list[Row]:
        try:
            found = self._measure(benchmark, say)
        except (Exception, pytest.skip.Exception) as error:
            self.failed.append(benchmark.name)
            self.console.print(f"{benchmark.name} failed: {error!r}", style="red", markup=False)
            return [Row(benchmark.name, "to run", "", str(error).splitlines()[0][:80], "", False)]
        return benchmark.rows(*(medians(found[side]) for side in benchmark.sides))

    def _measure(
        self, benchmark: Benchmark, say: Callable[[str], None]
    ) -> dict[str, list[Figures]]:
        rounds = min(self.rounds, benchmark.rounds or self.rounds)
        found: dict[str, list[Figures]] = {side: [] for side in benchmark.sides}
        for round_ in range(rounds):
            for side in benchmark.sides:
                say(f"{benchmark.name}: round {round_ + 1} of {rounds}, {side}")
                began = time.monotonic()
                with rig(side, self.quick, benchmark.server) as made:
                    self.server = self.server or _server(made.redis.info("server"))
                    figures = benchmark.measure(made)
                found[side].append(figures)
                self._log(benchmark, side, figures, time.monotonic() - began)
        return found

    def _log(self, benchmark: Benchmark, side: str, figures: Figures, seconds: float) -> None:
        values = ", ".join(f"{name} {value:,.4g}" for name, value in figures.items())
        line = f"{benchmark.name:<18} {side:<5} {values}  ({seconds:.0f} s)"
        self.console.print(line, style="dim", soft_wrap=True, highlight=False)


def _describe(progress: Progress, task: TaskID, text: str) -> None:
    progress.update(task, description=text)


def _server(info: dict[str, object]) -> str:
    name = info.get("server_name", "redis")
    return f"{name} {info.get('valkey_version', info['redis_version'])}"


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(BENCHMARKS)))
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--quick", is_flag=True, help="Small numbers, one round: to see that it works.")
@click.option("--write", type=click.Path(path_type=Path), help="Write a Markdown page.")
def main(names: tuple[str, ...], rounds: int, quick: bool, write: Path | None) -> None:
    """Run benchmarks, all by default, on both transports in turn."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    rounds = 1 if quick else rounds
    chosen = [BENCHMARKS[name] for name in names] or list(BENCHMARKS.values())
    run = Run(console, rounds, quick)
    rows = run.run(chosen)
    console.print(as_table(rows, "quick scale: not for comparing" if quick else ""))
    if write:
        options = [*names, *(["--quick"] if quick else ["--rounds", str(rounds)])]
        command = " ".join(["python -m tests.benchmarks", *options])
        write.write_text(as_page(rows, run.server, rounds, command, quick))
    sys.exit(1 if run.failed else 0)


if __name__ == "__main__":
    main()
