"""The commands `backup`, `restore` and `copy`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console

from celery_ext.cli.criteria import yes_option
from celery_ext.control.backup.transfer import UNDECODABLE
from celery_ext.errors import BackupError
from celery_ext.spark.backup import transfer as backups
from celery_ext.tasks.formatting import number, tasks_word

from .group import (
    NAMES,
    broker_options,
    connection_options,
    console,
    job_options,
    main,
    output,
    run_again,
    spark_of,
    unknown_queues,
)
from .progress import ask, following, show, table, watching


@main.command("backup")
@click.argument("path")
@broker_options
@click.option("--due-from", help="Only messages due at this time (UTC) or later.")
@click.option("--due-to", help="Only messages due before this time (UTC).")
@click.option("--tasks", help="Only these tasks: names or patterns, separated by commas.")
@click.option("--rows-per-task", help="About how many messages each task of Spark reads.")
@click.option("--overwrite", is_flag=True, help="Delete an existing backup at the path first.")
@click.option("--json", "as_json", is_flag=True, help="Print its content as a line of JSON.")
@click.pass_context
def backup_command(
    ctx: click.Context, /, path: str, overwrite: bool, as_json: bool, **options: Any
) -> None:
    """Write delayed messages to Parquet files."""
    spark = spark_of(ctx)
    with watching(spark, "backup"):
        found = backups.backup(spark, path, overwrite=overwrite, **options)
    if as_json:
        click.echo(json.dumps(asdict(found)))
        return
    _show(found.queues)
    click.echo(f"{tasks_word(found.messages)} are in {path}")
    if found.undecodable:
        click.echo(UNDECODABLE.format(number(found.undecodable)))


def _show(queues: Mapping[str, int], out: Console | None = None) -> None:
    if queues:
        (out or output()).print(table({queue: {"delayed": n} for queue, n in queues.items()}), "")


@main.command("restore")
@click.argument("path")
@connection_options
@click.option("--queues", type=NAMES, help="Only these, separated by commas.")
@job_options
@yes_option
@click.option("--dry-run", is_flag=True, help="Check the files and show their content.")
@click.pass_context
def restore_command(
    ctx: click.Context,
    /,
    path: str,
    queues: tuple[str, ...] | None,
    yes: bool,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Restore a backup. Existing messages stay."""
    # Row by row: long messages would not fit into columns of thousands of rows.
    ctx.obj.setdefault("spark.sql.parquet.enableVectorizedReader", "false")
    spark = spark_of(ctx)
    with console.status("Checking the backup"):
        rows = backups.read_backup(spark, path)
        summary = backups.summary(spark, path)
    wanted = queues or (*summary.queues,)
    found = {queue: count for queue, count in summary.queues.items() if queue in wanted}
    if queues and not found:
        raise BackupError(
            f"the backup at {path} has none of the queues {', '.join(queues)}: it has "
            f"{', '.join(summary.queues) or 'no messages'}"
        )
    for fault in unknown_queues(queues, summary.queues, f"the backup at {path}"):
        click.echo(f"Warning: {fault}", err=True)
    if dry_run and as_json:
        click.echo(json.dumps({**asdict(summary), "queues": found}))
    elif dry_run or not yes:
        click.echo(f"Made {summary.made_at} of {summary.server}", err=not dry_run)
        _show(found, None if dry_run else console)
    if dry_run:
        return
    total = sum(found.values())
    ask(f"Restore {tasks_word(total)}?", yes or not total)
    with (
        backups.counting(found, **options) as count,
        run_again(options["job_id"]),
        following(lambda: (min(count(), total), total), "restore"),
    ):
        options["total_rows"] = options["total_rows"] or total
        report = backups.restore(rows.where(rows.queue.isin(*wanted)), **options)
    show(report, "restored", as_json, options["rejects"])


@main.command("copy")
@broker_options
@click.option("--to", "to_broker", help="The URL of the target broker.")
@click.option(
    "--to-env",
    "to_broker_env",
    help="The environment variable with the URL of the target broker.",
)
@click.option("--to-app", "to_app", help="The Celery app whose broker is the target.")
@click.option("--to-transport-options", help="Transport options of the target broker, as JSON.")
@job_options
@yes_option
@click.pass_context
def copy_command(
    ctx: click.Context,
    /,
    queues: str | None,
    broker: str | None,
    broker_env: str | None,
    app: str | None,
    transport_options: str | None,
    yes: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Copy the backlog of a broker to another one."""
    source = {"broker": broker, "broker_env": broker_env, "app": app, "queues": queues}
    source["transport_options"] = transport_options
    target = {name.removeprefix("to_"): value for name, value in options.items()}
    if not (broker or broker_env or app):
        raise click.UsageError("give the broker to copy by one of --broker, --broker-env and --app")
    if not any(target.get(name) for name in ("broker", "broker_env", "app")):
        raise click.UsageError("give the target broker by one of --to, --to-env and --to-app")
    spark = spark_of(ctx)
    ask("A worker of either broker will run its tasks. Copy the backlog?", yes)
    with run_again(options["job_id"]), watching(spark, "copy"):
        report = backups.copy(spark, source, target)
    show(report, "restored", as_json, options["rejects"])
