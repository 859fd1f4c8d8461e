"""`cancel`, `reschedule`, `redirect`, `run-now`: change tasks by ids, or all that meet criteria."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

import click

from celery_ext.app.commands import all_of
from celery_ext.control.changes.change_many import Outcome
from celery_ext.control.delayed import Delayed
from celery_ext.tasks.formatting import MOVABLE, TasksTable, tasks_word
from celery_ext.tasks.query import Query
from celery_ext.tasks.times import shifted

from ..criteria import TEXT, asking_options, complete_queue, criteria, ids_argument
from ..session import Session, command
from ..times import LASTING, SPAN, TIME
from .listing import queues_table

#: The states of tasks that can be changed by their ids.
CHANGEABLE = (*MOVABLE, "ready")


@dataclass(frozen=True)
class Change:
    """A change to one task, or to many; `verb` and `past` describe it to the user."""

    verb: str
    past: str
    one: Callable[[Delayed, str, str | None], bool]
    many: Callable[..., Outcome]


_asking = all_of(ids_argument, criteria, asking_options)

_ready = click.option(
    "--ready", "state", flag_value="ready", help="Select ready tasks instead of delayed ones."
)


@command("cancel")
@_asking
@_ready
def cancel(session: Session, **given: Any) -> None:
    """Cancel tasks, by ids or by criteria.

    Ids may be of delayed and ready tasks. Criteria select delayed tasks, or with --ready those that
    wait for a free worker. The results of cancelled tasks are REVOKED.
    """
    _run(session, Change("Cancel", "cancelled", Delayed.cancel, Delayed.cancel_many), given)


@command("run-now")
@_asking
def run_now(session: Session, **given: Any) -> None:
    """Run delayed tasks now, by ids or by criteria.

    If you pass the id of a ready task, it runs next.
    """
    _run(session, Change("Run", "made ready", Delayed.run_now, Delayed.run_now_many), given)


@command("reschedule")
@click.option("--to", type=TIME, help="Due at this time, such as +2h or 2030-01-01T09:00.")
@click.option("--by", type=SPAN, help="Move by this time, such as 30m; earlier with a minus.")
@click.option(
    "--spread", type=LASTING, help="Spread evenly over this period, which starts at --to or now."
)
@_asking
@_ready
def reschedule(
    session: Session,
    to: datetime | None,
    by: timedelta | None,
    spread: timedelta | None,
    **given: Any,
) -> None:
    """Move tasks to another due time.

    Ids may be of delayed and ready tasks. Criteria select delayed tasks, or with --ready those that
    wait for a free worker.
    """
    if (by is None) == (to is None and spread is None):
        raise click.UsageError("Give --to, --spread or both, or else --by.")
    if given["ids"] and spread is not None:
        raise click.UsageError("--spread needs criteria, not ids.")

    def one(delayed: Delayed, id: str, queue: str | None) -> bool:
        eta = to
        if by is not None:
            info = delayed.get(id, queue)
            if info is None or info.state not in CHANGEABLE:
                return False
            # A ready task was due in the past, if ever, so it is moved relative to now.
            due = None if info.state == "ready" else info.eta
            eta = shifted(due or datetime.now(timezone.utc), by)
        return delayed.reschedule(id, eta=eta, queue=queue)

    def many(delayed: Delayed, query: Any, **options: Any) -> Outcome:
        return delayed.reschedule_many(query, by=by, to=to, spread=spread, **options)

    _run(session, Change("Reschedule", "rescheduled", one, many), given)


@command("redirect")
@click.option(
    "--to",
    "to_queue",
    type=TEXT,
    required=True,
    shell_complete=complete_queue,
    metavar="QUEUE",
    help="The queue to move them to.",
)
@_asking
@_ready
def redirect(session: Session, to_queue: str, **given: Any) -> None:
    """Move tasks to another queue, with their due times.

    Ids may be of delayed and ready tasks. Criteria select delayed tasks, or with --ready those that
    wait for a free worker.
    """
    session.delayed.check_queue(to_queue)

    def one(delayed: Delayed, id: str, queue: str | None) -> bool:
        return delayed.redirect(id, to_queue, queue)

    def many(delayed: Delayed, query: Any, **options: Any) -> Outcome:
        return delayed.redirect_many(query, to_queue, **options)

    _run(session, Change("Redirect", f"redirected to {to_queue}", one, many), given)


def _run(session: Session, change: Change, given: dict[str, Any]) -> None:
    ids, yes, dry_run = dict.fromkeys(given.pop("ids")), given.pop("yes"), given.pop("dry_run")
    query, queue = Query(**given), given.pop("queue")
    if not ids and query.is_empty:
        raise click.UsageError("Give ids or criteria; --task '*' selects all.")
    if not ids:
        _change_found(session, change, query, yes, dry_run)
    elif Query(**given).is_empty:
        _change_ids(session, change, ids, queue, dry_run)
    else:
        raise click.UsageError("Give either ids or criteria; --queue works with both.")


# By ids.


def _change_ids(
    session: Session, change: Change, ids: Collection[str], queue: str | None, dry_run: bool
) -> None:
    delayed = session.delayed
    if dry_run:
        known = filter(None, (delayed.get(id, queue) for id in ids))
        infos = [info for info in known if info.state in CHANGEABLE]
        found = {info.id for info in infos}
        session.print(TasksTable(infos, f"{change.verb} {tasks_word(len(infos))}:"))
    else:
        found = set()
        with (
            session.progress(change.verb, len(ids)) as advance,
            _if_unfinished(session, change, lambda: len(found)),
        ):
            for id in ids:
                if change.one(delayed, id, queue):
                    found.add(id)
                advance(1)
    missing = [id for id in ids if id not in found]
    changed = 0 if dry_run else len(found)
    facts = {"dry_run": dry_run, "matched": len(found), "changed": changed, "missing": missing}
    session.emit(facts)
    for id in ids:
        if id in found and not dry_run:
            session.print(f"{id} is {change.past}.")
        elif id not in found:
            session.err.print(f"{id} is neither delayed nor ready (any more).")
    if missing:
        session.exit(1)


# By criteria.


def _change_found(session: Session, change: Change, query: Any, yes: bool, dry_run: bool) -> None:
    preview = None
    if dry_run or not yes:
        with session.progress("Searching") as advance:
            preview = change.many(session.delayed, query, dry_run=True, progress=advance)
        _show(session, change, preview, asks=not dry_run)
    outcome = preview
    if not dry_run and (preview is None or preview.matched):
        if preview is not None:
            session.confirm(f"{change.verb} {tasks_word(preview.matched)}?")
        total = preview.matched if preview else None
        parts: list[int] = []

        def changed(count: int) -> None:
            parts.append(count)
            advance(count)

        with (
            session.progress(change.verb, total) as advance,
            _if_unfinished(session, change, lambda: sum(parts)),
        ):
            outcome = change.many(session.delayed, query, progress=changed)
    assert outcome is not None
    session.emit(_data(outcome))
    if not outcome.matched:
        session.nothing(f"No {query.state or 'delayed'} task matches the criteria.")
    if not outcome.dry_run:
        _report(session, change, outcome)


def _show(session: Session, change: Change, preview: Outcome, asks: bool) -> None:
    """Print what would change, on the stream of the question that may follow."""
    if not preview.matched or (session.as_json and not asks):
        return
    out = session.err if session.as_json else session.out
    more = "" if preview.matched == len(preview.sample) else ", such as"
    title = f"{change.verb} {tasks_word(preview.matched)}{more}:"
    out.print(queues_table({name: count for name, count in preview.queues.items() if count}))
    out.print("", TasksTable(preview.sample, title), "")


def _report(session: Session, change: Change, outcome: Outcome) -> None:
    session.print(f"{_said(change, outcome.changed)}.")
    if outcome.changed < outcome.matched:
        gone = outcome.matched - outcome.changed
        session.err.print(f"{tasks_word(gone)} were gone by then.")


def _said(change: Change, count: int) -> str:
    return f"{tasks_word(count)} {'is' if count == 1 else 'are'} {change.past}"


@contextmanager
def _if_unfinished(session: Session, change: Change, done: Callable[[], int]) -> Iterator[None]:
    """Report how many were changed if the change does not finish."""
    try:
        yield
    except BaseException:
        if count := done():
            session.err.print(f"Not finished: at least {_said(change, count)}.")
        raise


def _data(outcome: Outcome) -> dict[str, Any]:
    return {
        "dry_run": outcome.dry_run,
        "matched": outcome.matched,
        "changed": outcome.changed,
        "queues": {name: count for name, count in outcome.queues.items() if count},
        "sample": [info.as_dict() for info in outcome.sample],
    }
