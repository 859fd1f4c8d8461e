"""The consumers: how long their leases last, and how many messages they hold."""

from __future__ import annotations

from pydantic import BaseModel

from celery_ext.http.api.fields import Name

from ..readings import consumers, metrics
from ..visit import Shown, View, Visit, asked


class Asked(BaseModel):
    """The queue to show; None: all."""

    queue: Name | None = None


def look(visit: Visit) -> Shown:
    query = asked(visit, Asked)
    found = consumers(visit, query.queue)
    taken = {info.queue for info in found if info.lease_seconds > 0}
    return {
        "queue": query.queue,
        "consumers": found,
        "held": sum(info.unacked for info in found),
        "longest": max((info.lease_seconds for info in found), default=0),
        "without": [
            (name, each)
            for name, each in metrics(visit, query.queue).items()
            if name not in taken and each.delayed + each.ready
        ],
    }


VIEWS = [View("consumers", "/consumers", "Consumers", look, seconds=2, is_whole=True)]
