"""`policies`: shows and changes what is declared in the broker for the workers of a queue."""

from __future__ import annotations

from collections.abc import Iterable

import click
from rich.table import Table

from celery_ext.control.policies.declared import QueuePolicies
from celery_ext.tasks.formatting import moment, plain, table
from celery_ext.tasks.times import info_data

from ..criteria import queue_argument, queue_option
from ..session import Session, command


@command("policies", doubts_queue=False, despite_nodes_down=True)
@queue_option
def policies(session: Session, queue: str | None) -> None:
    """Show the policies that all workers of a queue obey.

    Also shows who declared them, and when.
    """
    _show(session, session.delayed.policies(queue))


@command("apply-policies", doubts_queue=False)
@queue_option
@click.option("-y", "--yes", is_flag=True, help="Do not ask before policies are removed.")
def apply_policies(session: Session, queue: str | None, yes: bool) -> None:
    """Replace the declared policies with those of this app.

    Workers declare theirs when they start, but never remove any. Run this after a deploy that has
    removed some.
    """
    removed = session.delayed.policies.unnamed(queue)
    if removed and not yes:
        names = ", ".join(removed)
        session.confirm(f"Remove the policies that this app does not name, of {names}?")
    _show(session, session.delayed.policies.apply(queue))


@command("drop-policies", doubts_queue=False)
@queue_argument
@click.option("-y", "--yes", is_flag=True, help="Do not ask before policies are removed.")
def drop_policies(session: Session, queue: str, yes: bool) -> None:
    """Remove all policies of a queue.

    They return when a worker starts that declares some.
    """
    session.delayed.check_queue(queue)
    if not yes:
        session.confirm(f"Remove all limits and other policies of queue {queue}, for all workers?")
    had_some = session.delayed.policies.drop(queue)
    session.emit({"dropped": had_some})
    if not had_some:
        session.nothing(f"Queue {queue} has no policies.")
    session.print(f"Queue {queue} has no policies any more.")


def _show(session: Session, found: list[QueuePolicies]) -> None:
    session.emit([info_data(each) for each in found])
    if not found:
        session.nothing("No policies are declared.")
    session.print(policies_table(found))
    if any(each.differs for each in found):
        session.print(
            "* This app declares others. They apply once one of its workers starts, or with "
            "apply-policies."
        )


def policies_table(found: Iterable[QueuePolicies]) -> Table:
    made = table("queue", "policies", "of", "declared (UTC)", "by")
    for each in found:
        at = moment(each.at) if each.at else "not yet"
        begin = each.queue + " *" * each.differs, at, each.by
        for of, texts in each.texts.items() or [("", ["none"])]:
            name, when, by = begin
            made.add_row(plain(name), plain(", ".join(texts)), plain(of), when, plain(by))
            begin = "", "", ""
    return made
