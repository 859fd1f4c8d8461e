"""`backup`, `restore`: the whole backlog to a file and back."""

from __future__ import annotations

from dataclasses import asdict

import click

from .. import backup as backups
from .criteria import queue_option
from .session import Session, command
from .words import number, tasks_word


@command("backup")
@click.argument("file", type=click.Path(dir_okay=False))
@queue_option
def backup(session: Session, file: str, queue: str | None) -> None:
    """Write what is delayed and what is dead to a file."""
    counts = session.delayed.counts(queue).values()
    total = sum(each.delayed + each.dead for each in counts)
    with session.progress("Backup", total) as advance:
        report = backups.backup(session.delayed, file, queue, advance)
    session.emit(asdict(report))
    session.print(
        f"{tasks_word(report.messages)} and {number(report.dead)} dead letters are in {file}, "
        f"{number(report.size_bytes)} bytes."
    )


@command("restore")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@queue_option
def restore(session: Session, file: str, queue: str | None) -> None:
    """Put back what a file has; what is there already stays as it is."""
    facts = backups.inspect(file)
    with session.progress("Restore", facts["messages"] + facts["dead"]) as advance:
        report = backups.restore(session.delayed, file, queue, advance, check=False)
    session.emit(asdict(report))
    session.print(
        f"{tasks_word(report.messages)} and {number(report.dead)} dead letters are restored; "
        f"{number(report.already)} were there already."
    )
