"""`consumers`: the consumers, and how long each lease lasts."""

from __future__ import annotations

from dataclasses import asdict

from rich.table import Table
from rich.text import Text

from celery_ext.control.counts import ConsumerInfo
from celery_ext.tasks.formatting import number, plain, table
from kombu_delayed.message.durations import length_text

from ..criteria import queue_option
from ..session import Session, command


@command("consumers", despite_nodes_down=True)
@queue_option
def consumers(session: Session, queue: str | None) -> None:
    """Show consumers, their leases and messages."""
    found = session.delayed.consumers(queue)
    session.emit([asdict(each) for each in found])
    if not found:
        session.nothing("There are no consumers.")
    session.print(consumers_table(found))


def consumers_table(found: list[ConsumerInfo]) -> Table:
    made = table("queue", "consumer", numbers=["lease", "unacked"])
    for each in found:
        ended = each.lease_seconds <= 0
        lease = Text("ended", "red") if ended else Text(length_text(each.lease_seconds))
        made.add_row(plain(each.queue), plain(each.name), lease, number(each.unacked))
    return made
