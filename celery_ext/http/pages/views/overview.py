"""The overview: counts, forecast, activity and alarms."""

from __future__ import annotations

from itertools import islice
from math import inf

from pydantic import BaseModel

from celery_ext.http.api.fields import Name
from kombu_delayed.store.queue_metrics import Metrics, fold

from ..activity import PARTS, ActivityReader
from ..alarms import alarms
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


VIEWS = [View("overview", "/", "Overview", look, seconds=2, is_whole_live=True)]
