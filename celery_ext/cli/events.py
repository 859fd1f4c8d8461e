"""`events`: what has happened to messages."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import click
from rich.text import Text

from kombu_delayed import events as streams
from kombu_delayed.events import Event

from ..times import from_ms
from .criteria import TEXT, queue_option
from .session import Session, command
from .tasks import limit_option
from .words import moment, plain

#: Seconds between two looks of `--follow`.
INTERVAL_SECONDS = 1

STYLES = {
    "scheduled": "cyan",
    "rescheduled": "cyan",
    "cancelled": "magenta",
    "delivered": "yellow",
    "acked": "green",
    "reclaimed": "red",
    "buried": "red",
}


@command("events")
@queue_option
@click.option("--id", "task_id", type=TEXT, help="Only of the task with this id.")
@limit_option(20)
@click.option("-f", "--follow", is_flag=True, help="Go on until Ctrl-C.")
def events(
    session: Session, queue: str | None, task_id: str | None, limit: int, follow: bool
) -> None:
    """Show what has happened to messages, the newest last.

    Kept are about as many for each queue as the transport option delayed_events says.
    With --json, each event is one line.
    """
    known = _newest(session, queue, task_id, limit)
    for event in known:
        _show(session, event)
    if not follow:
        if not known:
            session.nothing("No events are kept.")
        return
    with suppress(KeyboardInterrupt):
        for event in _following(session, queue, task_id):
            _show(session, event)


def _newest(session: Session, queue: str | None, task_id: str | None, limit: int) -> list[Event]:
    delayed = session.delayed
    if task_id is None and limit:
        names = session.queues(queue)
        found = [event for name in names for event in streams.newest(delayed.store, name, limit)]
    else:
        found = list(delayed.events(queue, task_id=task_id))
    return sorted(found, key=lambda event: event.at_ms)[-limit:]


def _following(session: Session, queue: str | None, task_id: str | None) -> Iterator[Event]:
    delayed = session.delayed
    known = {
        name: event.stream_id
        for name in session.queues(queue)
        for event in streams.newest(delayed.store, name)
    }
    while True:
        for event in delayed.events(queue, task_id=task_id, after=known):
            known[event.queue] = event.stream_id
            yield event
        time.sleep(INTERVAL_SECONDS)


def _show(session: Session, event: Event) -> None:
    if session.as_json:
        click.echo(json.dumps(_data(event)))
        return
    line = Text.assemble(
        (f"{moment(from_ms(event.at_ms))} ", "dim"),
        (f"{event.event:<11} ", STYLES.get(event.event, "")),
        plain(event.task or "(no task)", "bold"),
        " ",
        plain(event.id),
        (f" in {event.queue}", "dim"),
    )
    if event.consumer:
        line.append_text(plain(f" by {event.worker}", "dim"))
    if event.event in ("scheduled", "rescheduled") and event.due_ms is not None:
        line.append(f" due {moment(from_ms(event.due_ms))}")
    if event.deliveries:
        line.append(f", {event.deliveries} in vain", "red")
    session.print(line)


def _data(event: Event) -> dict[str, Any]:
    return {**asdict(event), "at_ms": event.at_ms, "worker": event.worker}
