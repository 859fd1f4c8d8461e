"""`limits`: how much may run, how much does, and what waits for it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone

from rich.table import Table
from rich.text import Text

from celery_ext.control.limits import KeyInfo, LimitInfo
from celery_ext.tasks.formatting import number, plain, remaining, table
from celery_ext.tasks.times import info_data

from ..criteria import queue_option
from ..session import Session, command


@command("limits")
@queue_option
def limits(session: Session, queue: str | None) -> None:
    """Show limits, their use and their busiest keys."""
    found = session.delayed.limits(queue)
    session.emit([info_data(each) for each in found])
    if not found:
        session.nothing("There are no limits.")
    session.print(limits_table(found))


def limits_table(found: Iterable[LimitInfo]) -> Table:
    numbers = ["in use", "of", "waiting", "first due"]
    made = table("queue", "limit", "rate", numbers=numbers)
    for each in found:
        name = each.name + (f" (by {each.by})" if each.by else "")
        own = None if each.keys is not None else each.capacity
        rate = plain(each.rate or "")
        made.add_row(plain(each.queue), plain(name), rate, *_counts(each, own))
        for key in each.shares or each.busiest:
            shown = plain(f"  {key.key or '(others)'}", style="dim")
            made.add_row("", shown, "", *_counts(key, key.slots or each.capacity))
    return made


def _counts(each: LimitInfo | KeyInfo, capacity: int | None) -> list[Text]:
    away = each.first_due - datetime.now(timezone.utc) if each.first_due else None
    return [_shown(each.in_use), _shown(capacity), _shown(each.waiting), remaining(away)]


def _shown(count: int | None) -> Text:
    return Text("" if count is None else number(count))
