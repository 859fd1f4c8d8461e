"""`backup`, `restore`: the whole backlog to a file and back."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any, TypeAlias

import click

from ..control.backup import transfer as backups
from ..tasks.formatting import letters_word, number, plain, table, tasks_word
from .criteria import queue_option, yes_option
from .session import Session, command

Counts: TypeAlias = dict[str, dict[str, int]]


@command("backup", doubts_queue=False)
@click.argument("file", type=click.Path(dir_okay=False))
@queue_option
def backup(session: Session, file: str, queue: str | None) -> None:
    """Write delayed messages and dead letters to a file."""
    if not file:
        raise click.UsageError("FILE is empty: name a file to write the backup to")
    counts = session.delayed.counts(queue).values()
    total = sum(each.delayed + each.dead for each in counts)
    with session.progress("Backup", total) as advance:
        report = backups.backup(session.delayed, file, queue, advance)
    session.emit(asdict(report))
    session.print(
        f"{tasks_word(report.messages)} and {letters_word(report.dead)} are in {file}, "
        f"{number(report.size_bytes)} bytes."
    )
    _show_undecodable(session, report.undecodable)


def _show_undecodable(session: Session, undecodable: int) -> None:
    if undecodable:
        session.print(backups.UNDECODABLE.format(number(undecodable)))


@command("restore", doubts_queue=False)
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@queue_option
@yes_option
@click.option(
    "--dry-run", is_flag=True, help="Check the file and show its content. Changes nothing."
)
def restore(session: Session, file: str, queue: str | None, yes: bool, dry_run: bool) -> None:
    """Restore a file. Messages that exist stay as they are."""
    with session.progress("Checking (bytes)", os.path.getsize(file)) as advance:
        facts = backups.inspect(file, advance)
    counts = {name: each for name, each in facts["counts"].items() if queue in (None, name)}
    matched = sum(sum(each.values()) for each in counts.values())
    report = backups.RestoreReport()
    if matched and (dry_run or not yes):
        _show(session, facts, counts, asks=not dry_run)
    if matched and not dry_run:
        if not yes:
            session.confirm(f"Restore {_both(counts)}?")
        with session.progress("Restore", facts["messages"] + facts["dead"]) as advance:
            report = backups.restore(session.delayed, file, queue, advance, check=False)
    session.emit({"dry_run": dry_run, "matched": matched, **asdict(report), "counts": counts})
    if not matched:
        session.nothing(f"The file has no messages{f' of queue {queue}' if queue else ''}.")
    if not dry_run:
        session.print(
            f"{tasks_word(report.messages)} and {letters_word(report.dead)} are restored; "
            f"{number(report.already)} were there already."
        )
        _show_undecodable(session, report.undecodable)


def _show(session: Session, facts: dict[str, Any], counts: Counts, asks: bool) -> None:
    """Print the content of the file, on the stream of the question that may follow."""
    if session.as_json and not asks:
        return
    out = session.err if session.as_json else session.out
    made = table("queue", numbers=["delayed", "dead"])
    for name, each in counts.items():
        made.add_row(plain(name), number(each["messages"]), number(each["dead"]))
    at = facts.get("made_at", "at an unknown time")
    server = facts.get("server", "an unknown server")
    out.print(plain(f"Made {at} of {server}"), made, "")


def _both(counts: Counts) -> str:
    messages, dead = (sum(each[kind] for each in counts.values()) for kind in ("messages", "dead"))
    return f"{tasks_word(messages)} and {letters_word(dead)}"
