"""`watch`: live counts, the load ahead and the next tasks."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timezone
from itertools import islice
from typing import Any, NamedTuple

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from celery_ext.control.counts import ConsumerInfo, Counts, Forecast, forecast_data
from celery_ext.tasks.formatting import TasksTable, moment
from celery_ext.tasks.query import Query
from celery_ext.tasks.task_info import TaskInfo

from ..criteria import queue_option
from ..outage import Outages
from ..session import Session, command, missing_text, those_that_answer
from ..tasks.listing import counts_table, soonest
from ..times import NumberRange
from .consumers import consumers_table
from .forecast import chart

#: The next hour in parts of five minutes.
HOURS, BUCKETS = 1, 12

NEXT = 5


class Look(NamedTuple):
    """The state of the broker at one time."""

    at: datetime
    counts: dict[str, Counts]
    forecast: Forecast
    next: list[TaskInfo]
    consumers: list[ConsumerInfo]
    #: The nodes of a Cluster that do not answer, and whose queues are missing.
    down: list[str]

    @classmethod
    def take(cls, session: Session, queue: str | None) -> Look:
        delayed, down = session.delayed, list[str]()
        if queue is None:
            delayed, down = those_that_answer(delayed)
        return cls(
            datetime.now(timezone.utc),
            delayed.counts(queue),
            delayed.forecast(HOURS, BUCKETS, queue),
            list(islice(soonest(delayed, Query(queue=queue)), NEXT)),
            delayed.consumers(queue),
            down,
        )

    @property
    def data(self) -> dict[str, Any]:
        return {
            "at": self.at.isoformat(),
            "counts": {name: asdict(each) for name, each in self.counts.items()},
            "forecast": forecast_data(self.forecast),
            "next": [info.as_dict() for info in self.next],
            "consumers": [asdict(each) for each in self.consumers],
            "down": self.down,
        }

    def render(self) -> RenderableType:
        parts: list[RenderableType] = [
            Text(f"{moment(self.at)} UTC\n", style="bold"),
            *([Text(f"{missing_text(self.down)}\n", style="yellow")] if self.down else []),
            counts_table(self.counts),
            Text("\nDue in the next hour", style="bold"),
            chart(self.forecast),
        ]
        if self.next:
            parts += [Text("\nNext", style="bold"), TasksTable(self.next)]
        if self.consumers:
            parts += [Text("\nConsumers", style="bold"), consumers_table(self.consumers)]
        return Group(*parts)


@command("watch")
@queue_option
@click.option(
    "-i",
    "--interval",
    type=NumberRange(0.1, 86_400),
    default=2,
    show_default=True,
    help="Seconds between two updates.",
)
@click.option("--times", type=click.IntRange(min=1), help="End after this number of updates.")
def watch(session: Session, queue: str | None, interval: float, times: int | None) -> None:
    """Show a live overview until Ctrl-C.

    Shows counts, the load of the next hour, the next tasks, and the consumers.
    With --json, each update is one line.
    """
    with suppress(KeyboardInterrupt):
        if session.as_json:
            for look in _looks(session, queue, interval, times):
                click.echo(json.dumps(look.data))
            return
        whole = session.out.is_terminal
        with Live(console=session.out, auto_refresh=False, screen=whole) as live:
            for look in _looks(session, queue, interval, times):
                live.update(look.render(), refresh=True)


def _looks(session: Session, queue: str | None, interval: float, times: int | None) -> Any:
    looks, outages = 0, Outages(session)
    while True:
        with outages:
            yield Look.take(session, queue)
            looks += 1
        if looks == times:
            return
        time.sleep(interval)
