"""Kills workers and the server at random under load, and counts what was lost."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tests.crash import report
from tests.crash.page import as_page
from tests.crash.run import Order, Result, run
from tests.crash.schedule import SERVERS
from tests.kit.workers import heed_signals

TRANSPORTS = ["delayed", "stock"]


def run_shown(console: Console, order: Order) -> Result:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(order.transport, total=1.0)

        def show(stage: str, share: float, text: str) -> None:
            progress.update(bar, completed=share, description=f"{order.transport}: {stage}, {text}")

        return run(order, show)


def option(name: str, **options: Any) -> Any:
    return click.option(name, show_default="default" in options, **options)


@click.command()
@option("--minutes", type=click.FloatRange(0.1), default=5)
@option("--stock-minutes", type=click.FloatRange(0.1), help="If not as many as ours.")
@option("--seed", type=int, default=1)
@option(
    "--transport",
    type=click.Choice(TRANSPORTS),
    multiple=True,
    default=TRANSPORTS,
    help="Repeatable.",
)
@option(
    "--server",
    type=click.Choice([*SERVERS, "all"]),
    default="single",
    help="sentinel: a master with two replicas, whose failovers are faults too; cluster: three "
    "masters with a replica each, whose failovers and moves of slots are; all: each in turn, for "
    "a third of the minutes.",
)
@option("--rate", type=float, default=40, help="Tasks sent per second.")
@option("--every", type=float, default=1.2, help="Seconds between faults.")
@option(
    "--reshard",
    type=click.IntRange(0),
    default=20_000,
    help="Messages of the queue whose slot moves at once, on a Cluster; 0: none moves.",
)
@option("--keep", type=click.Path(path_type=Path), help="Keep logs and journals there.")
@option("--write", type=click.Path(path_type=Path), help="Write a page of the results.")
def main(
    minutes: float, server: str, keep: Path | None, write: Path | None, **options: Any
) -> None:
    """Kill workers and the server at random, and count what is lost, late, or run twice."""
    heed_signals()
    console = Console()
    kinds = SERVERS if server == "all" else (server,)
    runs = []
    for kind in kinds:
        results = []
        for name in options["transport"]:
            if (kind, name) == ("cluster", "stock"):
                continue  # Kombu has no such transport
            whole = options["stock_minutes"] or minutes if name == "stock" else minutes
            order = Order(
                *(whole * 60 / len(kinds), options["seed"], name),
                *(options["rate"], options["every"], keep / kind / name if keep else None),
                *(kind, options["reshard"]),
            )
            results.append(run_shown(console, order))
            found = report.findings(results[-1])
            console.print(found, markup=False, highlight=False, soft_wrap=True)
        if results:
            console.print(report.as_table(results))
            runs.append(results)
    if write:
        write.write_text(as_page(runs, command(minutes, server, write, **options)))
    sys.exit(0 if all(results[0].verdict.good for results in runs) else 1)


def command(minutes: float, server: str, write: Path, **options: Any) -> str:
    """Returns the command line that repeats this run."""
    given = {"minutes": minutes, "stock-minutes": options["stock_minutes"]}
    given |= {name: options[name] for name in ("seed", "rate", "every")}
    given |= {"server": server, "reshard": options["reshard"]}
    given["transport"] = options["transport"][0] if len(options["transport"]) == 1 else None
    given["write"] = write
    texts = {k: f"{v:g}" if isinstance(v, float) else v for k, v in given.items()}
    shown = (f"--{name} {text}" for name, text in texts.items() if text is not None)
    return f"python -m tests.crash {' '.join(shown)}"


if __name__ == "__main__":
    main(prog_name="python -m tests.crash")
