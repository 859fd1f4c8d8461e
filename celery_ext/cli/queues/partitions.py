"""`partitions`: the parts of the backlog."""

from __future__ import annotations

from itertools import islice

from celery_ext.tasks.formatting import moment, number, plain, queue_data, table
from celery_ext.tasks.times import from_ms
from kombu_delayed.inspection.backlog import partition_count as count_of
from kombu_delayed.inspection.backlog import partitions as partitions_of
from kombu_delayed.store.calls.shards import label

from ..criteria import limit_option, queue_option
from ..session import Session, command


@command("partitions", despite_nodes_down=True)
@queue_option
@limit_option(20)
def partitions(session: Session, queue: str | None, limit: int) -> None:
    """Show the partitions of each backlog."""
    store, names = session.delayed.store, session.delayed.shards(queue)
    totals = {name: count for name in names if (count := count_of(store, name))}
    found = (
        (name, each)
        for name in totals
        for each in islice(partitions_of(store, name), limit or None)
    )
    if session.as_json:
        session.emit_each(
            {
                **queue_data(name),
                "partition": each.name,
                "from": from_ms(each.bound_ms).isoformat(),
                "messages": each.count,
            }
            for name, each in found
        )
    else:
        made = table("queue", "from (UTC)", "partition", numbers=["messages"])
        for name, each in found:
            made.add_row(
                plain(label(name)),
                moment(from_ms(each.bound_ms)),
                plain(each.name, style="dim"),
                number(each.count),
            )
        if totals:
            session.print(made)
    if not totals:
        session.nothing("Nothing is delayed.")
    for name, total in totals.items():
        if limit and total > limit:
            shown = f"{label(name)}: the first {limit} of {number(total)}; --limit 0 shows all."
            session.print(shown)
