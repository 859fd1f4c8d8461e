"""The commands `schedule`, `cancel` and `reschedule`, which read files of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from celery_ext.app.commands import all_of
from celery_ext.spark import cancel, reschedule, schedule
from celery_ext.spark.commands.files import FORMATS, format_of, queried, read_rows
from celery_ext.spark.sink.registry import JobReport

from .group import connection_options, job_options, main, naming, run_again, spark_of
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
    click.option(
        "--select",
        multiple=True,
        metavar="EXPRESSIONS",
        help="SQL expressions for the columns, such as \"user_id AS id, 'mail.remind' AS task\".",
    ),
    click.option("--sql", help='A query over the files, which are the table "rows".'),
    click.option(
        "--extra-columns",
        help="Other columns: drop (default), kwargs or headers of the task, or fail.",
    ),
    click.option("--time-zone", help="The time zone of times that have none. Default: UTC."),
    click.option("--time-of-day", help="The time of day of dates. Default: 00:00."),
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
    select: tuple[str, ...],
    sql: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    if select and sql:
        raise click.UsageError("give one of --select and --sql")
    spark = spark_of(ctx)
    with run_again(options["job_id"]), watching(spark, done):
        rows: DataFrame = read_rows(spark, path, format)
        if not sql and (format or format_of(path)) == "parquet" and not options["total_rows"]:
            options["total_rows"] = rows.count()  # from the ends of the files
        if select or sql:
            with naming("--sql" if sql else "--select"):
                rows = queried(rows, sql or f"SELECT {', '.join(select)} FROM rows")
        report = job(rows, label=path, **options)
    show(report, done, as_json, options["rejects"])
