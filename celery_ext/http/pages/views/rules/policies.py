"""The pauses, and the policies that all workers of a queue obey."""

from __future__ import annotations

from pydantic import BaseModel

from celery_ext.http.api.fields import Name

from ...visit import Shown, View, Visit, asked

#: How old a reading may be, and how many queues are shown.
SECONDS, SHOWN = 2.0, 200


class Asked(BaseModel):
    """The queue to show; None: all."""

    queue: Name | None = None


def look(visit: Visit) -> Shown:
    query: Asked = asked(visit, Asked)
    delayed, cache = visit.service.delayed, visit.service.cache
    names = visit.chosen_queues(query.queue)
    found = cache.get(("policies", *names), SECONDS, lambda: delayed.policies.of(names))
    pauses = cache.get(
        ("pauses", *names), SECONDS, lambda: [one for each in names for one in delayed.pauses(each)]
    )
    return {
        "queue": query.queue,
        "pauses": pauses,
        "policies": found[:SHOWN],
        "count": len(found),
        "queues": visit.queues(),
        "may_pause": visit.identity.has("admin"),
    }


VIEWS = [View("policies", "/policies", "Policies", look, seconds=5, is_whole=True)]
