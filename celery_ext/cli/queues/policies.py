"""`policies`: shows and changes what is declared in the broker for the workers of a queue."""

from __future__ import annotations

from collections.abc import Iterable

import click
from rich.table import Table

from celery_ext.control.policies.declared import QueuePolicies, policy_text
from celery_ext.tasks.formatting import moment, plain, table
from celery_ext.tasks.times import info_data

from ..criteria import TEXT, complete_queue, queue_option
from ..session import Session, command


@command("policies", doubts_queue=False)
@queue_option
def policies(session: Session, queue: str | None) -> None:
    """Show the policies that all workers of a queue obey, and who declared them."""
    _show(session, session.delayed.policies(queue))


@command("apply-policies")
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
@click.argument("queue", type=TEXT, shell_complete=complete_queue)
@click.option("-y", "--yes", is_flag=True, help="Do not ask before policies are removed.")
def drop_policies(session: Session, queue: str, yes: bool) -> None:
    """Remove all policies of a queue, until a worker that declares some starts."""
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
        parts = {"the queue": each.policies, "all queues": each.defaults, **each.tasks}
        texts = {of: ", ".join(map(policy_text, parts[of])) for of in parts if parts[of]}
        rows = [*texts.items()] or [("", "none")]
        for n, (of, text) in enumerate(rows):
            first = n == 0
            made.add_row(
                plain((each.queue + " *" * each.differs) if first else ""),
                plain(text),
                plain(of),
                at if first else "",
                plain(each.by if first else ""),
            )
    return made
