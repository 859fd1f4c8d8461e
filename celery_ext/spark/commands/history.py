"""The commands for lifecycle events: archive, compact, report."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import click

from .group import (
    archive_option,
    between,
    broker_options,
    connection_options,
    console,
    main,
    progress_bar,
    spark_of,
    target_option,
    time_options,
)


@main.command()
@broker_options
@click.option("--path", required=True, help="The directory of the archive.")
@click.option("--checkpoint", help="Where the position is stored. Default: in the archive.")
@click.option(
    "--interval", help=('Run continuously, such as "30 seconds". Default: once, to the end.')
)
@click.option("--starting-offsets", help="earliest (default) or latest, for a new archive.")
@click.option(
    "--max-rows-per-trigger", help="Entries per batch. One of a Spark job has up to 250 events."
)
@click.option("--rows-per-task", help="Entries that each task of Spark reads.")
@click.option(
    "--skip-lost", is_flag=True, help="Continue if events were trimmed before they were read."
)
@click.pass_context
def archive(
    ctx: click.Context,
    /,
    path: str,
    checkpoint: str | None,
    interval: str | None,
    skip_lost: bool,
    **options: Any,
) -> None:
    """Write new lifecycle events to Parquet."""
    from celery_ext.spark.events.archive import log_events, watch

    if skip_lost:
        options["fail_on_data_loss"] = "false"
    query = log_events(
        spark_of(ctx), path=path, checkpoint=checkpoint, interval=interval, **options
    )
    with progress_bar() as bar:
        task = bar.add_task("events", total=None)
        count = watch(query, lambda more: bar.advance(task, more))
    click.echo(f"{count:,} events written to {path}")


@main.command()
@archive_option
@click.option(
    "--path",
    help=(
        "Write a copy to this directory instead, and leave the archive; existing content is "
        "replaced."
    ),
)
@click.option(
    "--keep-days", type=click.IntRange(1), help="Delete events that are more days old (UTC)."
)
@click.pass_context
def compact(ctx: click.Context, /, archive: str, path: str | None, keep_days: int | None) -> None:
    """Merge the new batches of an archive into few large files.

    The files are sorted by day and queue, for frequent reading.
    """
    from celery_ext.spark.events.archive import read_archive
    from celery_ext.spark.events.compaction import compact, compact_archive

    if path and keep_days:
        raise click.UsageError("give one of --path and --keep-days")
    spark = spark_of(ctx)
    if path:
        with console.status("Copying"):
            compact(read_archive(spark, archive), path)
        click.echo(f"written to {path}")
        return
    with console.status("Merging"):
        done = compact_archive(spark, archive, keep_days=keep_days)
    click.echo(f"{done.batches:,} batches merged, {done.days:,} days of queues deleted")


@main.command()
@archive_option
@connection_options
@click.option("--out", required=True, help="A directory for the tables, and for the page.")
@click.option("--page", help="The file of the page, if the tables are not on this machine.")
@target_option
@time_options
@click.option("--title", default="Delayed tasks", help="Title of the page.")
@click.pass_context
def report(
    ctx: click.Context,
    /,
    archive: str,
    out: str,
    page: str | None,
    target_seconds: float,
    since: datetime | None,
    until: datetime | None,
    title: str,
    **broker: Any,
) -> None:
    """Write a report: Parquet tables and a page.

    With a broker, it includes the failures that workers recorded there.
    """
    try:
        from celery_ext.spark.reports.page import report
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"a report needs {error.name}: pip install 'kombu-delayed[report]'"
        ) from error
    from celery_ext.spark.events.archive import read_archive
    from celery_ext.spark.reports.failures import failures

    spark, has_broker = spark_of(ctx), any(broker.values())
    events = between(read_archive(spark, archive), since, until)
    failed = between(failures(spark, **broker), since, until) if has_broker else None
    with progress_bar() as bar:
        task = bar.add_task("tables", total=None)
        path = report(
            events,
            out,
            target_seconds,
            title=title,
            page_path=page,
            failures=failed,
            progress=lambda name: bar.advance(task),
        )
    click.echo(path)
