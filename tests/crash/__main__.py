"""Kills workers and the server at random under load, and counts what was lost."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tests.crash import report
from tests.crash.broker import KINDS
from tests.crash.page import as_page
from tests.crash.run import Order, Result, run
from tests.kit.workers import heed_signals


def run_shown(console: Console, order: Order) -> Result:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(order.transport, total=1.0)

        def show(stage: str, share: float, text: str) -> None:
            progress.update(bar, completed=share, description=f"{order.transport}: {stage}, {text}")

        return run(order, show)


@click.command()
@click.option("--minutes", type=click.FloatRange(0.1), default=5, show_default=True)
@click.option("--stock-minutes", type=click.FloatRange(0.1), help="If not as many as ours.")
@click.option("--seed", type=int, default=1, show_default=True)
@click.option(
    "--transport",
    "transports",
    type=click.Choice(["delayed", "stock"]),
    multiple=True,
    default=["delayed", "stock"],
    show_default=True,
    help="Repeatable.",
)
@click.option(
    "--server",
    type=click.Choice([*KINDS, "all"]),
    default="single",
    show_default=True,
    help="sentinel: a master with two replicas, whose failovers are faults too; cluster: three "
    "masters with a replica each, whose failovers and moves of slots are; all: each in turn, for "
    "a third of the minutes.",
)
@click.option("--rate", type=float, default=40, show_default=True, help="Tasks sent per second.")
@click.option("--every", type=float, default=1.2, show_default=True, help="Seconds between faults.")
@click.option(
    "--reshard",
    type=click.IntRange(0),
    default=20_000,
    show_default=True,
    help="Messages of the queue whose slot moves at once, on a Cluster; 0: none moves. All of them "
    "are one key, and the node stalls while it moves.",
)
@click.option("--policyless", is_flag=True, help="Let workers join that do not know the policies.")
@click.option("--keep", type=click.Path(path_type=Path), help="Keep logs and journals there.")
@click.option("--write", type=click.Path(path_type=Path), help="Write a page of the results.")
def main(
    minutes: float,
    stock_minutes: float | None,
    seed: int,
    transports: tuple[str, ...],
    server: str,
    rate: float,
    every: float,
    reshard: int,
    policyless: bool,
    keep: Path | None,
    write: Path | None,
) -> None:
    """Kill workers and the server at random, and count what is lost, late, or run twice."""
    heed_signals()
    console = Console()
    kinds = KINDS if server == "all" else (server,)
    runs = []
    for kind in kinds:
        results = []
        for name in transports:
            if (kind, name) == ("cluster", "stock"):
                continue  # Kombu has no such transport
            kept = keep / kind / name if keep else None
            whole = stock_minutes or minutes if name == "stock" else minutes
            seconds = whole * 60 / len(kinds)
            order = Order(seconds, seed, name, rate, every, kept, kind, reshard, policyless)
            result = run_shown(console, order)
            results.append(result)
            console.print(report.findings(result), markup=False, highlight=False, soft_wrap=True)
        if results:
            console.print(report.as_table(results))
            runs.append(results)
    if write:
        command = f"python -m tests.crash --minutes {minutes:g} "
        command += f"--stock-minutes {stock_minutes:g} " if stock_minutes else ""
        command += f"--seed {seed} --rate {rate:g} "
        command += f"--every {every:g} --server {server} --reshard {reshard} "
        command += "--policyless " * policyless
        if len(transports) == 1:
            command += f"--transport {transports[0]} "
        command += f"--write {write}"
        write.write_text(as_page(runs, command))
    sys.exit(0 if all(results[0].verdict.good for results in runs) else 1)


if __name__ == "__main__":
    main(prog_name="python -m tests.crash")
