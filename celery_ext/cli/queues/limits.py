"""`limits`: how many tasks may run, how many do, and how many wait."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta, timezone
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from celery_ext.control.policies.limits import KeyInfo, LimitInfo
from celery_ext.tasks.formatting import moment, number, plain, remaining, table
from celery_ext.tasks.times import info_data

from ..criteria import TEXT, queue_argument, queue_option
from ..session import Session, command
from ..times import LASTING


@command("limits", despite_nodes_down=True)
@queue_option
def limits(session: Session, queue: str | None) -> None:
    """Show limits, their use and their busiest keys."""
    found = session.delayed.limits(queue)
    session.emit([info_data(each) for each in found])
    names = [queue] if queue else session.delayed.queues()
    for name, why in session.delayed.policies.strange(names).items():
        session.err.print(f"Limits of queue {name} may be missing: {why}.", style="yellow")
    if not found:
        session.nothing("There are no limits.")
    session.print(limits_table(found))


@command("set-limit")
@queue_argument
@click.argument("name", type=TEXT, required=False)
@click.option("--concurrency", type=int, help="How many tasks may run at once.")
@click.option("--rate", help="How many tasks may start in a time, such as 100/m.")
@click.option("--burst", type=int, help="How many of them at once after a pause.")
@click.option("--for", "length", type=LASTING, help="Reset it after this time, such as 2h.")
@click.option("--why", default="", help="The reason, shown with the limit.")
def set_limit(
    session: Session, queue: str, name: str | None, length: timedelta | None, **given: Any
) -> None:
    """Change the numbers of a limit, for all workers.

    They also apply to waiting tasks. You can omit NAME if the queue has one limit.
    """
    if all(given[each] is None for each in ("concurrency", "rate", "burst")):
        raise click.UsageError("Give --concurrency, --rate or --burst.")
    found = session.delayed.set_limit(queue, name, for_=length, **given)
    session.emit(info_data(found))
    session.print(limits_table([found]))


@command("reset-limit")
@queue_argument
@click.argument("name", type=TEXT, required=False)
def reset_limit(session: Session, queue: str, name: str | None) -> None:
    """Restore the declared numbers of a limit."""
    was_set = session.delayed.reset_limit(queue, name)
    session.emit({"reset": was_set})
    if not was_set:
        session.nothing("It already has its declared numbers.")
    session.print("The declared numbers apply again.")


def limits_table(found: Iterable[LimitInfo]) -> Table:
    numbers = ["in use", "of", "waiting", "first due"]
    made = table("queue", "limit", "rate", numbers=numbers)
    for each in found:
        name = each.name + (f" (by {each.by})" if each.by else "")
        own = None if each.keys is not None else each.capacity
        rate = plain(each.rate or "")
        made.add_row(plain(each.queue), plain(name), rate, *_counts(each, own))
        if each.overridden:
            made.add_row("", plain(f"  {_said(each)}", style="yellow"), "", "", "", "", "")
        for key in each.shares or each.busiest:
            shown = plain(f"  {key.key or '(others)'}", style="dim")
            made.add_row("", shown, "", *_counts(key, key.slots or each.capacity))
    return made


def _said(each: LimitInfo) -> str:
    of = [f"{each.declared_capacity} at once"] if each.declared_capacity else []
    of += [each.declared_rate] if each.declared_rate else []
    until = f" until {moment(each.set_until)} UTC" if each.set_until else ""
    why = f": {each.set_why}" if each.set_why else ""
    return f"set by {each.set_by}{until}, declared is {' and '.join(of)}{why}"


def _counts(each: LimitInfo | KeyInfo, capacity: int | None) -> list[Text]:
    away = each.first_due - datetime.now(timezone.utc) if each.first_due else None
    return [_shown(each.in_use), _shown(capacity), _shown(each.waiting), remaining(away)]


def _shown(count: int | None) -> Text:
    return Text("" if count is None else number(count))
