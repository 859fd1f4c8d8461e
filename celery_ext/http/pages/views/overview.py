"""The overview: counts, forecast, activity and alarms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from math import inf

from pydantic import BaseModel

from celery_ext.control.counts import ConsumerInfo
from celery_ext.http.api.fields import Name
from celery_ext.tasks.formatting import letters_word, tasks_word
from kombu_delayed.errors import DelayedError
from kombu_delayed.inspection.doctor import examine_server
from kombu_delayed.message.durations import length_text
from kombu_delayed.store.queue_metrics import Metrics, fold

from ..activity import PARTS, ActivityReader
from ..readings import COUNT_SECONDS, consumers, forecast, metrics
from ..visit import Shown, View, Visit, asked
from .results.failures import shown_counts

#: How far to look ahead: hours, parts and label.
HORIZONS = {
    "hour": (1, 60, "Next hour"),
    "day": (24, 48, "Next 24 hours"),
    "week": (168, 56, "Next 7 days"),
    "month": (720, 60, "Next 30 days"),
}

#: The most queues on the page.
QUEUES = 200

NOTHING = Metrics(0, 0, 0, 0, 0, 0, 0.0, None, 0, 0, 0, False)

#: How late a task must be for a warning, and for a critical alarm.
LATE_SECONDS, VERY_LATE_SECONDS = 60, 900

#: How long the findings about server settings and clocks are cached: these change seldom, and each
#: check logs its findings.
SERVER_SECONDS = 600.0

LEVELS = ("critical", "warning", "note")


class _Asked(BaseModel):
    ahead: str = "day"
    queue: Name | None = None


def look(visit: Visit) -> Shown:
    query = asked(visit, _Asked)
    ahead = query.ahead if query.ahead in HORIZONS else "day"
    if visit.identity.tenants:
        return {"is_whole": False, "ahead": ahead}
    hours, parts, _ = HORIZONS[ahead]
    found = metrics(visit, query.queue)
    shards = visit.shards(query.queue)
    reader = visit.service.cache.get("activity", inf, ActivityReader)
    return {
        "is_whole": True,
        "queue": query.queue,
        "ahead": ahead,
        "horizons": {name: text for name, (_, _, text) in HORIZONS.items()},
        "queues": dict(islice(found.items(), QUEUES)),
        "queue_count": len(found),
        "total": fold(found.values()) if found else NOTHING,
        "forecast": forecast(visit, hours, parts, query.queue),
        "alarms": alarms(visit, found, consumers(visit, query.queue)),
        "activity": visit.service.cache.get(
            ("activity", query.queue, *shards),
            COUNT_SECONDS,
            lambda: reader.look(visit.service.delayed.store, shards),
        ),
        "minutes": PARTS // 4,
        "recorded": shown_counts(visit, shards),
    }


@dataclass(frozen=True)
class Alarm:
    """An alarm. `level` is one of LEVELS; `path` is the page that shows more."""

    level: str
    text: str
    path: str = ""
    queue: str = ""


def alarms(
    visit: Visit, queues: Mapping[str, Metrics], infos: Iterable[ConsumerInfo]
) -> list[Alarm]:
    """Problems that need attention, the most urgent first."""
    found = [alarm for queue, each in queues.items() for alarm in _of_queue(queue, each)]
    found += [alarm for info in infos for alarm in _of_consumer(info)]
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


VIEWS = [View("overview", "/", "Overview", look, seconds=2, is_whole_live=True)]
