"""The command `replay`, which schedules missed messages again."""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import click
from pyspark.sql import functions as F

from celery_ext.cli.criteria import yes_option
from celery_ext.cli.times import SPAN, TIME
from celery_ext.spark.backup import replaying as replays
from celery_ext.spark.backup.transfer import read_backup, summary
from celery_ext.spark.events.archive import read_archive
from celery_ext.spark.sink.registry import JobReport
from celery_ext.tasks.formatting import number, plain
from kombu_delayed.errors import OptionError

from .group import (
    NAMES,
    archive_option,
    connection_options,
    console,
    empty_table,
    job_options,
    main,
    naming,
    output,
    run_again,
    spark_of,
    unknown_queues,
)
from .progress import ask, show, watching

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STATES = ("delayed", "waiting", "ready", "unacked", "dead")


@main.command("replay")
@archive_option
@click.option(
    "--backup",
    "backups",
    multiple=True,
    help="A backup that may contain the messages; repeatable.",
)
@connection_options
@click.option(
    "--state",
    "states",
    type=click.Choice(STATES),
    multiple=True,
    help="The state after the last event; repeatable. Default: delayed, waiting and ready.",
)
@click.option("--since", type=TIME, help="Only messages that were due at this time (UTC) or later.")
@click.option(
    "--until",
    type=TIME,
    help="Only messages that were due before. Default: the time of the last event.",
)
@click.option("--queues", type=NAMES, help="Only these, separated by commas.")
@click.option(
    "--tasks",
    type=NAMES,
    help="Only these, separated by commas; * stands for any text, ? for any character.",
)
@click.option("--where", help="An SQL condition on queue, id, task, tenant, due, state, at.")
@click.option("--at", type=TIME, help="When to run. Default: at the due time, or now.")
@click.option(
    "--spread", type=SPAN, default=timedelta(0), help="Spread over this period, such as 10m."
)
@job_options
@yes_option
@click.option("--dry-run", is_flag=True, help="Show the missed messages. Changes nothing.")
@click.pass_context
def replay_command(
    ctx: click.Context,
    /,
    archive: str,
    backups: tuple[str, ...],
    states: tuple[str, ...],
    since: datetime | None,
    until: datetime | None,
    yes: bool,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Schedule missed messages again.

    Selects messages that were due and did not finish. A job replays each message once.

    Messages come from backups, dead letters from the broker.
    """
    states = states or replays.UNTOUCHED
    _check(states, bool(backups) or dry_run, options["spread"])
    narrow = {name: options.pop(name) for name in ("queues", "tasks", "where")}
    spark = spark_of(ctx)
    events = read_archive(spark, archive)
    if narrow["queues"]:
        known = [row.queue for row in events.select("queue").distinct().collect()]
        if fault := next(unknown_queues(narrow["queues"], known, f"the archive {archive}"), None):
            raise OptionError(fault)
    rows = _narrowed(replays.missed(events, states=states, since=since, until=until), **narrow)
    rows = rows.persist()
    kept = _kept(spark, backups)
    if dry_run or not yes:
        with console.status("Looking for what was missed"):
            found = replays.counted(rows, kept).orderBy("queue", "state").collect()
        _show_missed([row.asDict() for row in found], dry_run, as_json)
        if dry_run:
            return
        ask("Schedule what was missed again?", yes=not found)
    with run_again(options["job_id"]), watching(spark, "replay"):
        report = _replay(rows, kept, states, **options)
    show(report, "replayed", as_json, options["rejects"])


def _check(states: tuple[str, ...], has_messages: bool, spread: timedelta) -> None:
    if set(states) != {"dead"} and not has_messages:
        raise click.UsageError(
            "give a --backup that has the messages: lifecycle events do not. Only dead letters "
            "(--state dead) need none"
        )
    if spread < timedelta(0):
        raise click.UsageError(f"--spread is a length of time from 0 on, not {spread}")
    if "dead" in states and spread:
        raise click.UsageError("dead letters cannot be spread: replay them separately")


def _narrowed(
    rows: DataFrame,
    queues: tuple[str, ...] | None,
    tasks: tuple[str, ...] | None,
    where: str | None,
) -> DataFrame:
    if queues:
        rows = rows.where(F.col("queue").isin(*queues))
    if tasks:
        patterns = "|".join(map(_regex, tasks))
        rows = rows.where(F.col("task").rlike(f"^(?:{patterns})$"))
    with naming("--where"):
        return rows.where(where) if where else rows


def _regex(pattern: str) -> str:
    """A regular expression for Java. Those of `fnmatch.translate` only work in Python."""
    return "".join({"*": ".*", "?": "."}.get(char, re.escape(char)) for char in pattern)


def _kept(spark: SparkSession, paths: tuple[str, ...]) -> DataFrame | None:
    newest = sorted(paths, key=lambda path: summary(spark, path).made_at, reverse=True)
    return replays.newest_first(read_backup(spark, path) for path in newest) if newest else None


def _replay(
    rows: DataFrame,
    kept: DataFrame | None,
    states: tuple[str, ...],
    at: datetime | None,
    spread: timedelta,
    **options: Any,
) -> JobReport:
    """Replay dead letters and messages of backups; returns one report."""
    report = JobReport(options["job_id"])
    if kept is not None and set(states) != {"dead"}:
        lost = rows.where("state <> 'dead'")
        report = replays.replay(lost, kept, at=at, over=spread, **options)
    if "dead" in states:
        dead = replays.replay_dead(rows.where("state = 'dead'"), at=at, **options)
        report.accepted += dead.accepted
        report.already += dead.already
        for queue, count in dead.queues.items():
            report.queues[queue] = report.queues.get(queue, 0) + count
    return report


def _show_missed(found: list[dict[str, Any]], dry_run: bool, as_json: bool) -> None:
    if dry_run and as_json:
        click.echo(json.dumps(found))
        return
    if not found:
        click.echo("No missed message was found.", err=not dry_run)
        return
    made = empty_table("queue", "state", numbers=("missed", "in a backup"))
    for row in found:
        shown = number(row["missed"]), number(row["kept"])
        made.add_row(plain(row["queue"]), row["state"], *shown)
    (output() if dry_run else console).print(made, "")
