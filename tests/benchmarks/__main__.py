"""Measure this transport beside the stock one: `python -m tests.benchmarks [NAME …]`.

The name `peers` measures other queues, too. It installs what they need with pip and npm, below
`.venv/peers`; RabbitMQ comes from the machine.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

import click
import pytest
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tests.benchmarks.peers.table import measure_peers
from tests.benchmarks.report import BENCHMARKS, Benchmark, Figures, Row, as_page, as_table
from tests.benchmarks.rig import rig

#: In the order of the page.
GROUPS = "workers", "backlog", "idle", "shutdown", "bulk", "events", "gates", "http", "callbacks"
GROUPS += "failovers", "liveness", "outcomes", "shards", "moves", "waking", "sizing", "large"
GROUPS += "forms", "spark", "spark_forms", "spark_by_hand", "spark_simulate"

#: The measurements of other queues, which have a table of their own.
PEERS = "peers"

for group in GROUPS:
    import_module(f"tests.benchmarks.{group}")


class Run:
    """Runs benchmarks one after the other and collects their rows."""

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
                say = lambda text, task=task: progress.update(task, description=text)  # noqa: E731
                rows += self._rows(benchmark, say)
                progress.remove_task(task)
        return rows

    def _rows(self, benchmark: Benchmark, say: Callable[[str], None]) -> list[Row]:
        try:
            found = self._measure(benchmark, say)
        except (Exception, pytest.skip.Exception) as error:
            self.failed.append(benchmark.name)
            self.console.print(f"{benchmark.name} failed: {error!r}", style="red", markup=False)
            message = str(error).splitlines()[0][:80]
            return [Row(benchmark.name, "to run", "", message, "", False)]
        return benchmark.rows(found)

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
                values = ", ".join(f"{name} {value:,.4g}" for name, value in figures.items())
                took = f"({time.monotonic() - began:.0f} s)"
                line = f"{benchmark.name:<18} {side:<5} {values}  {took}"
                self.console.print(line, style="dim", soft_wrap=True, highlight=False)
        return found


def _server(info: dict[str, object]) -> str:
    name = info.get("server_name", "redis")
    return f"{name} {info.get('valkey_version', info['redis_version'])}"


@click.command()
@click.argument("names", nargs=-1, type=click.Choice([*BENCHMARKS, PEERS]))
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--quick", is_flag=True, help="Small numbers, one round: to see that it works.")
@click.option("--write", type=click.Path(path_type=Path), help="Write a Markdown page.")
def main(names: tuple[str, ...], rounds: int, quick: bool, write: Path | None) -> None:
    """Run benchmarks, all by default, on both transports in turn."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    rounds = 1 if quick else rounds
    run = Run(console, rounds, quick)
    rows = run.run([BENCHMARKS[name] for name in names or BENCHMARKS if name != PEERS])
    if rows:
        console.print(as_table(rows, "quick scale: not for comparing" if quick else ""))
    peers = ""
    if PEERS in (names or [PEERS]):
        peers, failed = measure_peers(rounds, quick, partial(console.print, highlight=False))
        run.failed += failed
        console.print(peers, soft_wrap=True, markup=False)
    if write:
        options = [*names, *(["--quick"] if quick else ["--rounds", str(rounds)])]
        command = " ".join(["python -m tests.benchmarks", *options])
        write.write_text(as_page(rows, run.server, rounds, command, quick, peers))
    sys.exit(1 if run.failed else 0)


if __name__ == "__main__":
    main()
