"""The command `simulate`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, asdict, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from celery_ext.app.commands import all_of
from celery_ext.spark.reports.formatting import duration, number, share
from celery_ext.spark.simulation.model import MOST_MESSAGES, SPREADS, Arrivals, Fleet
from celery_ext.tasks.formatting import facts_table

from .group import broker_options, console, main, output, spark_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from celery_ext.spark.simulation.result import Result
    from celery_ext.spark.simulation.run import Simulation


def options_of(given: type, but: tuple[str, ...] = ()) -> Callable[[Any], Any]:
    """Adds an option for each field of a class of parameters, from the field's metadata."""
    return all_of(*(_option(each) for each in fields(given) if each.name not in but))


def _option(field: Any) -> Callable[[Any], Any]:
    name, meaning = f"--{field.name.replace('_', '-')}", field.metadata["meaning"]
    default = None if field.default is MISSING else field.default
    more: dict[str, Any] = {"default": default, "show_default": default is not None}
    if isinstance(default, bool):
        return click.option(name, is_flag=True, help=meaning)
    if "range" not in field.metadata:
        return click.option(name, type=click.Choice(SPREADS), help=meaning, **more)
    kind = int if isinstance(default, int) else float
    return click.option(name, type=kind, help=meaning, **more)


@main.command()
@options_of(Fleet)
@click.option(
    "--messages", type=click.IntRange(1, MOST_MESSAGES), help="The total number of messages."
)
@options_of(Arrivals, but=("messages",))
@click.option("--due", help="Instead of --messages: Parquet with a column due.")
@broker_options
@click.option(
    "--most-messages",
    type=click.IntRange(1),
    default=10_000_000,
    show_default=True,
    help="If there are more, a sample is simulated.",
)
@click.option("--out", help="Write tables to this directory as Parquet.")
@click.option("--plot", type=click.Path(path_type=Path), help="Write a chart: .svg, .png, .pdf.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as a line of JSON.")
@click.pass_context
def simulate(
    ctx: click.Context,
    /,
    messages: int | None,
    due: str | None,
    most_messages: int,
    out: str | None,
    plot: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Simulate a load: lateness, workers, servers.

    The load is the backlog of a broker, the times in --due, or --messages, spread by the options
    from --hours to --delay-p95-seconds.
    """
    from celery_ext.spark.simulation import run as job

    fleet = Fleet(**_taken(options, Fleet))
    given = _taken(options, Arrivals)
    broker = {name: value for name, value in options.items() if value is not None}
    if [messages is None, due is None, not broker].count(False) != 1:
        raise click.UsageError("give the load by one of --messages, --due and the broker's options")
    if messages is None and Arrivals(**given) != Arrivals():
        raise click.UsageError("--hours, --peak and similar options only apply to --messages")
    arrivals = None if messages is None else Arrivals(messages=messages, **given)
    draw = _drawing(plot) if plot else None
    spark = spark_of(ctx)
    with console.status("Simulating"):
        load = arrivals or _load(spark, due, broker)
        start = datetime.now(timezone.utc) if broker else None
        found = job.simulate(spark, fleet, load, start=start, most_messages=most_messages)
        if out:
            found.write(out)
        if draw:
            draw(found)
    if as_json:
        click.echo(json.dumps(asdict(found.result)))
    else:
        output().print(table_of(found.result))


def _taken(options: dict[str, Any], given: type) -> dict[str, Any]:
    names = [each.name for each in fields(given) if each.name in options]
    return {name: options.pop(name) for name in names}


def _load(spark: SparkSession, due: str | None, broker: dict[str, Any]) -> DataFrame:
    from celery_ext.spark import backlog

    if due is not None:
        return spark.read.parquet(due)
    return backlog(spark, columns=["queue", "due"], **broker)


def _drawing(plot: Path) -> Callable[[Simulation], None]:
    """Raise errors before the simulation starts: the plotting library may be missing."""
    try:
        from celery_ext.spark.simulation.plots import check_file, save
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"a picture needs {error.name}: pip install 'kombu-delayed[report]'"
        ) from error
    check_file(plot)

    def draw(found: Simulation) -> None:
        windows = found.windows.select("begin_seconds", "p50_seconds", "p99_seconds").collect()
        save(str(plot), found.course, [row.asDict() for row in windows])

    return draw


def table_of(result: Result) -> Table:
    made = facts_table()
    for row in _rows(result):
        made.add_row(*row)
    return made


def _rows(result: Result) -> list[tuple[str, str]]:
    part = result.simulated / result.messages
    whole = "all of them" if part == 1 else f"{number(result.simulated)}, {share(part)}"
    return [
        ("messages", number(result.messages)),
        ("simulated", whole),
        ("workers, slots", f"{number(result.workers)}, {number(result.slots)}"),
        ("lateness, mean", duration(result.mean_seconds)),
        ("lateness p50", _with_error(result.p50_seconds, result.p50_error)),
        ("lateness p95", _with_error(result.p95_seconds, result.p95_error)),
        ("lateness p99", _with_error(result.p99_seconds, result.p99_error)),
        ("lateness, worst", duration(result.max_seconds)),
        ("slots in use", share(result.utilisation)),
        ("last one starts after", duration(result.ends_seconds)),
        ("redelivered", number(round(result.redelivered))),
        ("lost while running", number(round(result.lost))),
        ("busiest minute", f"{number(round(result.busiest_rate))} messages/s"),
        ("most in Redis", f"{number(result.most_messages)} messages, {_size(result.most_bytes)}"),
        ("servers", f"{number(result.nodes)}, for their {result.nodes_because_of}"),
        ("parts of the load", number(result.shards)),
    ]


def _with_error(seconds: float, error: float | None) -> str:
    return duration(seconds) + (f" ± {duration(error)}" if error is not None else "")


def _size(size_bytes: float) -> str:
    return (
        f"{size_bytes / 2**30:,.1f} GiB"
        if size_bytes >= 2**30
        else f"{size_bytes / 2**20:,.1f} MiB"
    )
