"""Files of rows into the backlog: scheduled, cancelled, rescheduled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from celery_ext.app.commands import all_of
from celery_ext.spark import cancel, reschedule, schedule
from celery_ext.spark.commands.files import FORMATS, read_rows
from celery_ext.spark.sink.job_ledger import JobReport

from .group import connection_options, job_options, main, run_again, spark_of
from .progress import show, watching

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

row_options = all_of(
    click.argument("path"),
    click.option(
        "--format",
        type=click.Choice(FORMATS),
        help=(
            "Format of the files: JSON lines, or CSV with a header. Default: from the "
            "suffix of the path."
        ),
    ),
    connection_options,
    click.option("--queue", help="The queue of rows without a queue."),
    click.option(
        "--queues", help="The queues that rows may name, separated by commas. Default: any."
    ),
    click.option(
        "--key-columns",
        help="Columns from which ids are made, separated by commas. Default: column id.",
    ),
    job_options,
)


@main.command("schedule")
@row_options
@click.pass_context
def schedule_command(ctx: click.Context, /, **options: Any) -> None:
    """Schedule a task for each row of files.

    The columns are task, id, args, eta or countdown, and others as for a DataFrame.
    """
    _run(ctx, schedule, "scheduled", **options)


@main.command("cancel")
@row_options
@click.pass_context
def cancel_command(ctx: click.Context, /, **options: Any) -> None:
    """Cancel the delayed messages in files of ids."""
    _run(ctx, cancel, "cancelled", **options)


@main.command("reschedule")
@row_options
@click.pass_context
def reschedule_command(ctx: click.Context, /, **options: Any) -> None:
    """Move messages to the times in files.

    The columns are id, and eta or countdown.
    """
    _run(ctx, reschedule, "rescheduled", **options)


def _run(
    ctx: click.Context,
    job: Callable[..., JobReport],
    done: str,
    path: str,
    format: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    spark = spark_of(ctx)
    with run_again(options["job_id"]), watching(spark, done):
        rows: DataFrame = read_rows(spark, path, format)
        report = job(rows, **options)
    show(report, done, as_json, options["rejects"])
