"""Alarms: problems that need attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from celery_ext.control.counts import ConsumerInfo
from celery_ext.tasks.formatting import letters_word, tasks_word
from kombu_delayed.errors import DelayedError
from kombu_delayed.inspection.doctor import examine_server
from kombu_delayed.message.durations import length_text
from kombu_delayed.store.queue_metrics import Metrics

from .visit import Visit

#: How late a task must be for a warning, and for a critical alarm.
LATE_SECONDS, VERY_LATE_SECONDS = 60, 900

#: How long the findings about server settings and clocks are cached: these change seldom, and each
#: check logs its findings.
SERVER_SECONDS = 600.0

LEVELS = ("critical", "warning", "note")


@dataclass(frozen=True)
class Alarm:
    """An alarm. `level` is one of LEVELS; `path` is the page that shows more."""

    level: str
    text: str
    path: str = ""
    queue: str = ""


def alarms(
    visit: Visit, metrics: Mapping[str, Metrics], consumers: Iterable[ConsumerInfo]
) -> list[Alarm]:
    found = [alarm for queue, each in metrics.items() for alarm in _of_queue(queue, each)]
    found += [alarm for info in consumers for alarm in _of_consumer(info)]
    found += visit.service.cache.get("server", SERVER_SECONDS, lambda: _of_server(visit))
    return sorted(found, key=lambda alarm: LEVELS.index(alarm.level))


def _of_queue(queue: str, found: Metrics) -> Iterable[Alarm]:
    if found.paused:
        yield Alarm("note", f"{queue} is paused.", "/backlog", queue)
    waiting = found.due + found.ready
    if waiting and not found.consumers:
        yield Alarm(
            "critical", f"{queue} has no consumer: {tasks_word(waiting)} due.", "/consumers", queue
        )
    if found.oldest_due_seconds >= LATE_SECONDS:
        level = "critical" if found.oldest_due_seconds >= VERY_LATE_SECONDS else "warning"
        late = length_text(found.oldest_due_seconds)
        yield Alarm(level, f"The oldest task in {queue} is {late} late.", "/backlog", queue)
    if found.oldest_waiting_seconds >= LATE_SECONDS:
        since = length_text(found.oldest_waiting_seconds)
        wait = "waits" if found.waiting == 1 else "wait"
        text = f"{tasks_word(found.waiting)} in {queue} {wait} for limits or for a turn"
        yield Alarm("warning", f"{text}; the first was due {since} ago.", "/tenants", queue)
    if found.dead:
        yield Alarm("note", f"{letters_word(found.dead)} in {queue}.", "/dead", queue)


def _of_consumer(info: ConsumerInfo) -> Iterable[Alarm]:
    if info.lease_seconds <= 0 and info.unacked:
        text = f"The lease of {info.name} on {info.queue} has expired. "
        text += f"Other consumers will take over its {tasks_word(info.unacked)}."
        yield Alarm("warning", text, "/consumers", info.queue)


def _of_server(visit: Visit) -> list[Alarm]:
    try:
        finding = examine_server(visit.service.delayed.store)
    except DelayedError as error:
        return [Alarm("critical", str(error))]
    return [Alarm("warning", text) for text in finding.examples] if finding else []
