"""`failed`, `running`, `retrying`, `slow`, `history`: the outcomes of tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from celery_ext.tasks.formatting import (
    STATE_STYLES,
    away,
    moment,
    number,
    one_line,
    plain,
    table,
)
from celery_ext.tasks.history import Step, TaskHistory
from celery_ext.tasks.times import from_ms
from kombu_delayed.message.durations import length_text

from ...app.commands import all_of
from ..criteria import limit_option, queue_option, recorded_options, task_option
from ..session import Session, command

_criteria: Callable[[Any], Any] = all_of(
    queue_option, task_option, recorded_options, limit_option(20)
)

STYLES = {**STATE_STYLES, "started": "yellow", "timed out": "red", "overran": "red"}

NOTHING = {
    "failed": "No failed task is recorded.",
    "running": "No running task is recorded.",
    "retrying": "No task that waits to be retried is recorded.",
    "slow": "No slow task is recorded.",
}


def _lists(of: str, help: str) -> click.Command:
    def show(session: Session, limit: int, **criteria: Any) -> None:
        show_recorded(session, of, limit, **criteria)

    show.__doc__ = help
    return command(of, despite_nodes_down=True)(_criteria(show))


failed = _lists(
    "failed",
    "Show tasks that failed, timed out or were lost.\n\n"
    "They are counted by error, and listed with the latest first.",
)
running = _lists("running", "Show running tasks, their workers and run times.")
retrying = _lists("retrying", "Show tasks that wait for another try, and why.")
slow = _lists("slow", "Show tasks that were slow lately, the slowest first.")


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
            (". Times are in UTC.", "dim"),
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


def show_recorded(session: Session, of: str, limit: int, **criteria: Any) -> None:
    """Print a list of tasks; failed ones are also counted by error."""
    histories = []
    with session.progress("Searching") as advance:
        for each in session.delayed.recorded(of, **criteria):
            histories.append(each)
            advance(1)
    histories.sort(key=lambda each: each.steps[-1].at_ms if each.steps else 0, reverse=True)
    if of == "slow":
        histories.sort(key=lambda each: each.run_seconds or 0, reverse=True)
    if session.as_json:
        session.emit_each(each.as_dict() for each in histories[: limit or None])
    if not histories:
        session.nothing(NOTHING[of])
    if of == "failed":
        session.print(_by_error(histories))
    session.print(_table(histories[: limit or None], of))
    if limit and len(histories) > limit:
        session.print(f"The first {limit} of {number(len(histories))}; --limit 0 shows all.")


def _by_error(histories: Iterable[TaskHistory]) -> Table:
    counts = Counter((each.failure.error if each.failure else "", each.task) for each in histories)
    made = table("error", "task", numbers=["tasks"])
    for (error, task), count in counts.most_common(20):
        made.add_row(plain(error or "(its process was lost)"), plain(task), number(count))
    return made


def _table(histories: Iterable[TaskHistory], of: str) -> Table:
    made = table("time (UTC)", "state", "queue", "task", "reason", "id", numbers=["for"])
    for each in histories:
        failure, last = each.failure, each.last
        reason = failure.said if failure else ""
        if of == "running":
            reason = each.worker
        elif of == "slow" and each.overran and each.overran.limit_ms is not None:
            limit = f"ran over its time limit of {each.overran.limit_ms / 1000:g} s"
            reason = f"{limit}; {reason}" if reason else limit
        elif of == "retrying" and last and last.next_ms is not None:
            due = from_ms(last.next_ms) - datetime.now(timezone.utc)
            reason = f"attempt {last.attempt + 1} {away(due)}; {reason}"
        made.add_row(
            moment(last.at if last else None),
            plain(each.state, STATE_STYLES.get(each.state, "")),
            plain(each.queue),
            one_line(plain(each.task, "bold")),
            one_line(plain(reason)),
            plain(each.id, "dim"),
            _length(each),
        )
    return made


def _length(history: TaskHistory) -> str:
    if history.state == "running" and history.started is not None:
        seconds = (datetime.now(timezone.utc) - history.started).total_seconds()
        return length_text(int(max(seconds, 0)))
    return "" if history.run_ms is None else length_text(round(history.run_ms / 1000))
