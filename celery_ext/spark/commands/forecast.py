"""The command `forecast`."""

from __future__ import annotations

import json
from datetime import timezone
from typing import Any

import click
from rich.table import Table

from celery_ext.spark.reports.formatting import share
from celery_ext.tasks.formatting import plain

from .group import (
    archive_option,
    broker_options,
    console,
    empty_table,
    main,
    output,
    spark_of,
    target_option,
)


@main.command()
@broker_options
@archive_option
@click.option("--hours", default=24, show_default=True, help="How far to look ahead.")
@click.option("--confidence", default=0.9, show_default=True, help="Confidence of the interval.")
@target_option
@click.option("--out", help="Also write the forecast to this directory as Parquet.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print a line of JSON for each queue and hour."
)
@click.pass_context
def forecast(
    ctx: click.Context,
    /,
    archive: str,
    hours: int,
    confidence: float,
    target_seconds: float,
    out: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Forecast the load of the next hours.

    The output includes the task slots that the load needs.
    """
    from celery_ext.spark.events.archive import read_archive
    from celery_ext.spark.reports.forecast import forecast_of

    spark = spark_of(ctx)
    with console.status("Reading the backlog and its history"):
        found = forecast_of(
            spark,
            read_archive(spark, archive),
            hours=hours,
            confidence=confidence,
            target_seconds=target_seconds,
            **options,
        ).persist()
        if out:
            found.write.mode("overwrite").parquet(out)
        rows = [row.asDict() for row in found.orderBy("queue", "hour").collect()]
    for row in rows:
        row["hour"] = row["hour"].astimezone(timezone.utc)
    if as_json:
        for row in rows:
            click.echo(json.dumps({**row, "hour": row["hour"].isoformat()}))
    else:
        output().print(table_of(rows, confidence))
        for line in tested(rows):
            click.echo(line)


def tested(rows: list[dict[str, Any]]) -> list[str]:
    """The accuracy that the forecast of each queue would have had in the last days."""
    found = {
        row[
            "queue"
        ]: f"{plain(row['queue'])}: {row['method']}, off by {share(row['error'])} in the "
        f"last days (mean of similar hours: {share(row['mean_error'])}), "
        f"{share(row['coverage'])} of hours within the interval"
        for row in rows
        if row["error"] is not None
    }
    return list(found.values())


def table_of(rows: list[dict[str, Any]], confidence: float) -> Table:
    numbers = ("known", "expected", f"{confidence:.0%} of the time", "slots")
    made = empty_table("queue", "hour (UTC)", numbers=numbers)
    for row in rows:
        made.add_row(
            row["queue"],
            f"{row['hour']:%m-%d %H:%M}",
            f"{row['known']:,}",
            f"{row['expected']:,.0f}",
            f"{row['low']:,.0f} to {row['high']:,.0f}",
            "?" if row["workers"] is None else f"{row['workers']:,}",
        )
    return made
