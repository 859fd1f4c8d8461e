"""Prints the tasks that workers have recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import datetime, timezone
from itertools import islice
from typing import Any

from rich.table import Table

from celery_ext.tasks.formatting import (
    STATE_STYLES,
    away,
    moment,
    number,
    one_line,
    plain,
    table,
)
from celery_ext.tasks.history import TaskHistory
from celery_ext.tasks.times import from_ms
from kombu_delayed.message.durations import length_text

from ..session import Session

NOTHING = {
    "failed": "No failed task is recorded.",
    "running": "No running task is recorded.",
    "retrying": "No task that waits to be retried is recorded.",
    "slow": "No slow task is recorded.",
}


def show_recorded(session: Session, of: str, limit: int, **criteria: Any) -> None:
    """Print a list of tasks; failed ones are also counted by error."""
    found = session.delayed.recorded(of, **criteria)
    if session.as_json:
        if not session.emit_each(each.as_dict() for each in (islice(found, limit or None))):
            session.nothing(NOTHING[of])
        return
    histories = []
    with session.progress("Searching") as advance:
        for each in found:
            histories.append(each)
            advance(1)
    if not histories:
        session.nothing(NOTHING[of])
    histories.sort(key=lambda each: each.steps[-1].at_ms if each.steps else 0, reverse=True)
    if of == "slow":
        histories.sort(key=lambda each: each.run_ms or 0, reverse=True)
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
