"""`events`: the lifecycle events of messages."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict

import click
from rich.text import Text

from celery_ext.tasks.formatting import moment, plain
from celery_ext.tasks.times import from_ms
from kombu_delayed.inspection import events as streams
from kombu_delayed.inspection.events import Event

from ..criteria import TEXT, limit_option, queue_option
from ..outage import Outages
from ..session import Session, command

#: Seconds between two reads of `--follow`.
INTERVAL_SECONDS = 1

#: Seconds between two searches of `--follow` for new queues.
NEW_QUEUES_SECONDS = 5

STYLES = {
    "scheduled": "cyan",
    "rescheduled": "cyan",
    "cancelled": "magenta",
    "waiting": "blue",
    "delivered": "yellow",
    "acked": "green",
    "dropped": "magenta",
    "reclaimed": "red",
    "buried": "red",
}


@command("events")
@queue_option
@click.option("--id", "task_id", type=TEXT, help="Only events of the task with this id.")
@limit_option(20)
@click.option("-f", "--follow", is_flag=True, help="Continue with new events until Ctrl-C.")
def events(
    session: Session, queue: str | None, task_id: str | None, limit: int, follow: bool
) -> None:
    """Show lifecycle events of messages, the newest last. Times are in UTC.

    The transport option delayed_events sets how many each queue keeps.
    With --json, each event is one line.
    """
    names = session.delayed.shards(queue) if follow else []
    positions = {name: _last_id(session, name) for name in names}
    found = _newest(session, queue, task_id, limit)
    for event in found:
        _show(session, event)
    if follow:
        shown = {(event.stream, event.stream_id) for event in found}
        with suppress(KeyboardInterrupt):
            for event in _following(session, queue, positions, task_id):
                if (event.stream, event.stream_id) not in shown:
                    _show(session, event)
    elif not found:
        of = "" if task_id is None else f" of a task {task_id}"
        session.nothing(f"No events{of} are kept.")


def _last_id(session: Session, queue: str) -> str:
    last = streams.newest(session.delayed.store, queue)
    return last[0].stream_id if last else "0"


def _newest(session: Session, queue: str | None, task_id: str | None, limit: int) -> list[Event]:
    delayed = session.delayed
    if task_id is None and limit:
        names = session.delayed.shards(queue)
        found = [event for name in names for event in streams.newest(delayed.store, name, limit)]
    else:
        found = list(delayed.events(queue, task_id=task_id))
    return sorted(found, key=lambda event: event.at_ms)[-limit:]


def _following(
    session: Session, queue: str | None, positions: dict[str, str], task_id: str | None
) -> Iterator[Event]:
    look_again_at, outages = time.monotonic() + NEW_QUEUES_SECONDS, Outages(session)
    while True:
        with outages:
            if time.monotonic() >= look_again_at:
                for name in session.delayed.shards(queue):
                    positions.setdefault(name, "0")
                look_again_at = time.monotonic() + NEW_QUEUES_SECONDS
            for name in positions:
                for page in streams.pages(session.delayed.store, name, positions[name]):
                    positions[name] = page[-1].stream_id
                    yield from (event for event in page if task_id in (None, event.id))
        time.sleep(INTERVAL_SECONDS)


def _show(session: Session, event: Event) -> None:
    if session.as_json:
        facts = {**asdict(event), "at_ms": event.at_ms, "worker": event.worker}
        click.echo(json.dumps(facts))
        return
    line = Text.assemble(
        (f"{moment(from_ms(event.at_ms))} ", "dim"),
        (f"{event.event:<11} ", STYLES.get(event.event, "")),
        plain(event.task or "(no task)", "bold"),
        " ",
        plain(event.id),
        plain(f" in {event.queue}", "dim"),
    )
    if event.consumer:
        line.append_text(plain(f" by {event.worker}", "dim"))
    if event.event in ("scheduled", "rescheduled") and event.due_ms is not None:
        line.append(f" due {moment(from_ms(event.due_ms))}")
    if event.deliveries:
        line.append(f", failed deliveries: {event.deliveries}", "red")
    if event.reason:
        line.append_text(plain(f": {event.reason}", "dim"))
    session.print(line)
