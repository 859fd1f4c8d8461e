"""`metrics`: the numbers for an autoscaler, of each queue or of each of its shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import click
from rich.table import Table

from celery_ext.tasks.formatting import facts_table, number, plain, table
from kombu_delayed.message.durations import length_text
from kombu_delayed.store.calls.shards import label, shard_name
from kombu_delayed.store.queue_metrics import Metrics

from ..criteria import queue_option
from ..session import Session, command

_COUNTS = ("waiting", "ready", "unacked", "dead", "consumers")
_TIMES = ("minute", "hour", "day")
_HEADINGS = ("delayed", "due", *_COUNTS, "late", "next", *(f"next {time}" for time in _TIMES))
_ABOUT = "\N{ALMOST EQUAL TO}"


@command("metrics", despite_nodes_down=True)
@queue_option
@click.option("--shards", "by_shard", is_flag=True, help="Show each shard of a queue.")
def metrics(session: Session, queue: str | None, by_shard: bool) -> None:
    """Show counts, lateness, and tasks due soon."""
    if by_shard:
        shards = session.delayed.metrics_by_shard(queue)
        session.emit({name: [asdict(each) for each in found] for name, found in shards.items()})
        named = {
            label(shard_name(name, n)): each
            for name, found in shards.items()
            for n, each in enumerate(found)
        }
    else:
        named = session.delayed.metrics(queue)
        session.emit({name: asdict(each) for name, each in named.items()})
    made: list[Table] = [metrics_table(named)]
    if not session.fits(made[0]):
        made = [_below_each_other(name, each) for name, each in named.items()]
    session.print(*made)
    if any(each.is_estimate for each in named.values()):
        session.print(f"{_ABOUT}: partly estimated.")


def metrics_table(found: Mapping[str, Metrics]) -> Table:
    made = table("queue", numbers=_HEADINGS)
    for name, each in found.items():
        made.add_row(plain(name), *_numbers(each))
    return made


def _below_each_other(name: str, found: Metrics) -> Table:
    """The metrics of one queue, for a terminal that is too narrow for a row."""
    made = facts_table()
    made.add_row("queue", plain(name))
    for heading, each in zip(_HEADINGS, _numbers(found), strict=True):
        made.add_row(heading, each)
    return made


def _numbers(found: Metrics) -> list[str]:
    about = _ABOUT if found.is_estimate else ""
    ahead = found.next_due_seconds
    return [
        number(found.delayed),
        about + number(found.due),
        *(number(getattr(found, count)) for count in _COUNTS),
        length_text(found.oldest_due_seconds) if found.oldest_due_seconds else "",
        "" if ahead is None else f"in {length_text(ahead)}",
        *(about + number(getattr(found, f"due_within_{time}")) for time in _TIMES),
    ]
