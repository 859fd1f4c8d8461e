"""`forecast`: a bar chart of when tasks are due."""

from __future__ import annotations

from datetime import timedelta

import click
from rich.bar import Bar
from rich.table import Table

from celery_ext.control.counts import Forecast, forecast_data
from celery_ext.tasks.formatting import number, tasks_word
from kombu_delayed.store.store import CALL_LIMIT

from ..criteria import queue_option
from ..session import Session, command
from ..times import NumberRange

#: A thousand years.
MOST_HOURS = 1_000 * 366 * 24


@command("forecast", despite_nodes_down=True)
@click.option(
    "--hours",
    type=NumberRange(0, MOST_HOURS, min_open=True),
    default=24,
    show_default=True,
    help="How far to look ahead.",
)
@click.option(
    "--buckets",
    type=click.IntRange(1, CALL_LIMIT - 1),
    default=24,
    show_default=True,
    help="Number of bars in the chart.",
)
@queue_option
def forecast(session: Session, hours: float, buckets: int, queue: str | None) -> None:
    """Show a chart of when tasks are due."""
    found = session.delayed.forecast(hours, buckets, queue)
    session.emit(forecast_data(found))
    session.print(chart(found))
    session.print("")
    session.print(
        f"{tasks_word(found.total)} delayed: {number(found.overdue)} overdue, "
        f"{number(sum(each.count for each in found.buckets))} in the chart, "
        f"{number(found.later)} later. Times are in UTC."
    )


def chart(found: Forecast) -> Table:
    """A bar for each bucket; the date is shown where it changes."""
    longest = max((each.count for each in found.buckets), default=0) or 1
    made = Table.grid(padding=(0, 1), expand=True)
    made.add_column(style="dim", no_wrap=True)
    made.add_column(no_wrap=True)
    made.add_column(justify="right", no_wrap=True)
    made.add_column(ratio=1)
    date = ""
    for each in found.buckets:
        day = f"{each.start:%a %Y-%m-%d}"
        clock = f"{each.start:{'%H:%M' if each.length >= timedelta(minutes=1) else '%H:%M:%S'}}"
        bar = Bar(longest, 0, each.count, color="cyan")
        made.add_row("" if day == date else day, clock, number(each.count), bar)
        date = day
    return made
