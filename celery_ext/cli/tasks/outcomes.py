"""`failed`, `running`, `retrying`, `slow`, `history`: the outcomes of tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from rich.text import Text

from celery_ext.tasks.formatting import STATE_STYLES, moment, plain
from celery_ext.tasks.history import Step
from celery_ext.tasks.times import from_ms

from ...app.commands import all_of
from ..criteria import queue_option, recorded_options, task_option
from ..session import Session, command
from .listing import limit_option
from .recorded import show_recorded

_criteria: Callable[[Any], Any] = all_of(
    queue_option, task_option, recorded_options, limit_option(20)
)

STYLES = {**STATE_STYLES, "started": "yellow", "timed out": "red", "overran": "red"}


def _lists(of: str, help: str) -> click.Command:
    def show(session: Session, limit: int, **criteria: Any) -> None:
        show_recorded(session, of, limit, **criteria)

    show.__doc__ = help
    return command(of)(_criteria(show))


failed = _lists(
    "failed", "Show tasks that have failed, timed out or were lost, by error and the latest first."
)
running = _lists(
    "running", "Show the running tasks, their workers, and for how long they have run."
)
retrying = _lists("retrying", "Show tasks that wait for another try, with their last error.")
slow = _lists("slow", "Show the tasks that have run the longest, of those that were slow lately.")


@command("history")
@click.argument("id")
@queue_option
def history(session: Session, id: str, queue: str | None) -> None:
    """Show what has happened to a task, over all attempts."""
    found = session.delayed.history(id, queue)
    session.emit(found.as_dict() if found else None)
    if found is None:
        session.nothing(f"There are no records of task {id}.")
    session.print(
        Text.assemble(
            plain(found.task or "(no task)", "bold"),
            plain(f" {found.id} in {found.queue} is "),
            (found.state, STYLES.get(found.state, "")),
        )
    )
    for step in found.steps:
        session.print(_line(step))
        if step.traceback:
            session.print(_indented(step.traceback))


def _line(step: Step) -> Text:
    of = f"/{step.attempts}" if step.attempts else ""
    line = Text.assemble(
        (f"{moment(step.at)} ", "dim"),
        (f"{step.event:<10} ", STYLES.get(step.event, "")),
        (f"attempt {step.attempt}{of}", "dim"),
    )
    if step.worker:
        line.append_text(plain(f" by {step.worker}", "dim"))
    if step.run_ms is not None:
        line.append(f" after {step.run_ms / 1000:g} s", "dim")
    if step.limit_ms is not None:
        line.append(f" its time limit of {step.limit_ms / 1000:g} s", "dim")
    if step.error:
        line.append_text(plain(f" {step.said}"))
    if step.next_ms is not None:
        line.append(f", next {moment(from_ms(step.next_ms))}")
    return line


def _indented(text: str) -> Text:
    return Text("\n").join(plain(f"    {line}", "dim") for line in text.splitlines())
