"""`list`, `show`, `find`, `count`: show delayed tasks."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import datetime, timezone
from itertools import chain, islice
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from celery_ext.control.changes.change_many import shard_pages
from celery_ext.control.counts import Counts
from celery_ext.control.delayed import Delayed
from celery_ext.tasks.formatting import (
    STATE_STYLES,
    TasksTable,
    away,
    facts_table,
    number,
    plain,
    remaining,
    table,
    tasks_word,
)
from celery_ext.tasks.progress import Progress
from celery_ext.tasks.query import STATES, Query
from celery_ext.tasks.task_info import TaskInfo
from kombu_delayed.store.outcomes.records import LISTS

from ..criteria import criteria, limit_option, queue_option, recorded_options
from ..session import Session, command
from .outcomes import show_recorded

#: Criteria that select only tasks that workers have recorded.
RECORDED = "error", "worker", "longer_than", "shorter_than"

#: Facts of a task that are times, shown with how far away they are.
TIMES = "eta", "started", "ended"


def soonest(
    delayed: Delayed, query: Query, progress: Progress = lambda count: None
) -> Iterator[TaskInfo]:
    found = [
        chain.from_iterable(shard_pages(delayed, shard, query, progress))
        for shard in delayed.shards(query.queue)
    ]
    return heapq.merge(*found, key=lambda info: info.due_ms or 0)


def _present(
    session: Session, find: Callable[[Progress], Iterator[TaskInfo]], limit: int
) -> tuple[int, bool]:
    """Print the tasks that are found; returns how many, and whether there are more.

    JSON is printed as they are found, without checking for more.
    """
    if session.as_json:
        found = find(lambda count: None)
        return session.emit_each(info.as_dict() for info in islice(found, limit or None)), False
    with session.progress("Searching") as advance:
        found = find(advance)
        infos = [*islice(found, limit or None)]
        has_more = len(infos) == limit > 0 and next(found, None) is not None
    if infos:
        session.print(TasksTable(infos))
    return len(infos), has_more


@command("list", despite_nodes_down=True)
@queue_option
@limit_option(20)
def list_(session: Session, queue: str | None, limit: int) -> None:
    """Show the tasks that are due next."""
    count, _ = _present(session, lambda _: soonest(session.delayed, Query(queue=queue)), limit)
    if not count:
        session.nothing("Nothing is delayed.")
    total = sum(each.delayed for each in session.delayed.counts(queue).values())
    if limit and total > count:
        session.print(f"The first {count} of {tasks_word(total)}; --limit 0 shows all.")


@command("find", despite_nodes_down=True)
@criteria
@click.option(
    "--state",
    type=click.Choice((*STATES, *LISTS)),
    default="delayed",
    show_default=True,
    help="States that workers record take only --queue, --task and the options from --error on.",
)
@recorded_options
@limit_option(100)
def find(session: Session, state: str, limit: int, **given: Any) -> None:
    """Show tasks in a state that match all criteria."""
    others = {name: given.pop(name) for name in RECORDED}
    if state not in STATES:
        kept = {name: given.pop(name) for name in ("queue", "task")}
        if any(given.values()):
            options = ", ".join(map(_option, (*kept, *others)))
            raise click.UsageError(f"--state {state} takes {options}")
        show_recorded(session, state, limit, **kept, **others)
        return
    if wrong := [name for name, value in others.items() if value is not None]:
        raise click.UsageError(
            f"{_option(wrong[0])} needs --state with what workers record: {', '.join(LISTS)}"
        )

    def search(progress: Progress) -> Iterator[TaskInfo]:
        if state == "ready":
            return session.delayed.find(**given, state=state, progress=progress)
        return soonest(session.delayed, Query(**given), progress)

    count, has_more = _present(session, search, limit)
    if not count:
        session.nothing(f"No {state} task matches the criteria.")
    if has_more:
        session.print(f"The first {count}; there are more, --limit 0 shows all.")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@command("show")
@click.argument("id")
@queue_option
def show(session: Session, id: str, queue: str | None) -> None:
    """Show a task in any state."""
    with session.progress("Searching") as advance:
        info = session.delayed.get(id, queue, progress=advance)
    session.emit(info.as_dict() if info else None)
    if info is None:
        session.nothing(f"The broker has no task {id}.")
    session.print(_facts(info))


def _facts(info: TaskInfo) -> Table:
    made = facts_table()
    for name, value in info.as_dict().items():
        if name == "state":
            shown = plain(value, style=STATE_STYLES.get(value, ""))
        elif name in TIMES and value:
            shown = _at(datetime.fromisoformat(value), is_due=name == "eta")
        elif value in (None, "", 0) or name == "remaining_seconds":
            continue
        else:
            shown = plain(value)
        made.add_row(name.replace("_", " "), shown)
    return made


def _at(moment: datetime, is_due: bool) -> Text:
    """A time, and how far away it is; red if a task that is due then is late."""
    length = moment - datetime.now(timezone.utc)
    shown = plain(f"{moment:%Y-%m-%d %H:%M:%S} UTC, ")
    return shown.append_text(remaining(length) if is_due else plain(away(length)))


@command("count", doubts_queue=False, despite_nodes_down=True)
@criteria
def count(session: Session, **given: Any) -> None:
    """Count messages by queue and state.

    With criteria, count the delayed tasks that match all of them.
    """
    query = Query(**given)
    if query.queue is not None:
        session.delayed.check_queue(query.queue)
    if not replace(query, queue=None).is_empty:
        _count_found(session, query)
        return
    counts = session.delayed.counts(query.queue)
    session.emit({name: asdict(each) for name, each in counts.items()})
    session.print(counts_table(counts))


def _count_found(session: Session, query: Query) -> None:
    with session.progress("Searching") as advance:
        found = session.delayed.cancel_many(query, dry_run=True, progress=advance)
    queues = {name: count for name, count in found.queues.items() if count}
    session.emit({"delayed": found.matched, "queues": queues})
    session.print(queues_table(queues))
    if not found.matched:
        session.nothing("No delayed task matches the criteria.")


def queues_table(queues: dict[str, int]) -> Table:
    made = table("queue", numbers=["tasks"])
    for name, each in queues.items():
        made.add_row(plain(name), number(each))
    if len(queues) != 1:
        made.add_section()
        made.add_row("all", number(sum(queues.values())), style="bold")
    return made


def counts_table(counts: dict[str, Counts]) -> Table:
    states = ("delayed", "due", "ready", "unacked", "dead")
    made = table("queue", numbers=states)
    for name, each in counts.items():
        numbers = asdict(each)
        made.add_row(plain(name), *(_cell(state, numbers[state]) for state in states))
    if len(counts) > 1:
        made.add_section()
        totals = [sum(asdict(each)[state] for each in counts.values()) for state in states]
        made.add_row("all", *map(number, totals), style="bold")
    return made


def _cell(state: str, count: int) -> Any:
    return plain(number(count), style=STATE_STYLES.get(state, "") if count else "dim")
