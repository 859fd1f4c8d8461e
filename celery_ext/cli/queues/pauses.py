"""`pause` and `resume`: keep workers from starting tasks of a queue, and let them continue."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from datetime import timedelta

import click
from rich.table import Table

from celery_ext.control.policies.pauses import QueuePause
from celery_ext.tasks.formatting import moment, plain, table
from celery_ext.tasks.times import info_data

from ..criteria import TEXT, complete_queue, queue_argument
from ..session import Session, command
from ..times import LASTING

#: Options that name a part of a queue.
task_option = click.option("--task", type=TEXT, help="Only tasks of this name; * is any text.")
tenant_option = click.option("--tenant", type=TEXT, help="Only tasks of this tenant.")


@command("pause", doubts_queue=False)
@click.argument("queue", type=TEXT, shell_complete=complete_queue, required=False)
@task_option
@tenant_option
@click.option("--for", "length", type=LASTING, help="Resume after this time, such as 2h.")
@click.option("--why", default="", help="The reason, shown with the pause.")
@click.option(
    "--drain", type=LASTING, help="Wait until no task of the queue runs, for this time at most."
)
def pause(
    session: Session,
    queue: str | None,
    length: timedelta | None,
    why: str,
    drain: timedelta | None,
    **part: str | None,
) -> None:
    """Pause a queue, or a task or a tenant in it.

    No worker starts its tasks. Running tasks and producers continue. Without a queue, show what is
    paused.
    """
    if queue is not None:
        with session.progress("Waiting for running tasks") if drain else nullcontext():
            found = [session.delayed.pause(queue, why=why, for_=length, drain=drain, **part)]
    elif length is not None or drain is not None or why or any(part.values()):
        raise click.UsageError("Give the queue to pause.")
    else:
        found = session.delayed.pauses()
    session.emit([info_data(each) for each in found])
    if not found:
        session.nothing("No queue is paused.")
    session.print(pauses_table(found))


@command("resume")
@queue_argument
@task_option
@tenant_option
def resume(session: Session, queue: str, **part: str | None) -> None:
    """Resume a paused queue, or a task or a tenant in it."""
    was_paused = session.delayed.resume(queue, **part)
    session.emit({"resumed": was_paused})
    what = _part_text(queue, **part)
    if not was_paused:
        session.nothing(f"{what} is not paused.")
    session.print(f"{what} is resumed.")


def pauses_table(found: Iterable[QueuePause]) -> Table:
    made = table("paused", "since (UTC)", "until (UTC)", "by", "why")
    for each in found:
        until = moment(each.until) if each.until else "no end"
        what = _part_text(each.queue, each.task, each.tenant)
        made.add_row(plain(what), moment(each.since), until, plain(each.by), plain(each.why))
    return made


def _part_text(queue: str, task: str | None, tenant: str | None) -> str:
    parts = [f"task {task}"] * (task is not None) + [f"tenant {tenant}"] * (tenant is not None)
    text = " of ".join([*parts, f"queue {queue}"])
    return text[0].upper() + text[1:]
