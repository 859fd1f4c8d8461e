"""`pause` and `resume`: let workers leave a queue alone, and go on with it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import click
from rich.table import Table

from celery_ext.control.pauses import QueuePause
from celery_ext.tasks.formatting import moment, plain, table
from celery_ext.tasks.times import info_data

from ..criteria import TEXT, complete_queue
from ..session import Session, command
from ..times import SPAN

queue_argument = click.argument("queue", type=TEXT, shell_complete=complete_queue)


@command("pause")
@click.argument("queue", type=TEXT, shell_complete=complete_queue, required=False)
@click.option("--for", "length", type=SPAN, help="Resume after this time, such as 2h.")
@click.option("--why", default="", help="The reason, for whoever sees the pause.")
def pause(session: Session, queue: str | None, length: timedelta | None, why: str) -> None:
    """Pause a queue: no worker begins a task of it.

    Tasks that run go on, and producers, too. Without a queue, show those that are paused.
    """
    if queue is not None:
        found = [session.delayed.pause(queue, why=why, for_=length)]
    elif length is not None or why:
        raise click.UsageError("Give the queue to pause.")
    else:
        found = session.delayed.pauses()
    session.emit([info_data(each) for each in found])
    if not found:
        session.nothing("No queue is paused.")
    session.print(pauses_table(found))


@command("resume")
@queue_argument
def resume(session: Session, queue: str) -> None:
    """Resume a paused queue."""
    was_paused = session.delayed.resume(queue)
    session.emit({"resumed": was_paused})
    if not was_paused:
        session.nothing(f"Queue {queue} is not paused.")
    session.print(plain(f"Queue {queue} is resumed."))


def pauses_table(found: Iterable[QueuePause]) -> Table:
    made = table("queue", "since (UTC)", "until (UTC)", "by", "why")
    for each in found:
        until = moment(each.until) if each.until else "resumed"
        made.add_row(plain(each.queue), moment(each.since), until, plain(each.by), plain(each.why))
    return made
