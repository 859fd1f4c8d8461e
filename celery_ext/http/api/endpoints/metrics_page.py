"""The metrics of this process and of the broker's queues, as Prometheus reads them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from celery_ext.http.problems import Problem
from celery_ext.metrics.measuring import shown
from celery_ext.metrics.queues import work

from ..models import QueueMetrics
from ..operations import Call, Json, Operation


async def show_metrics(call: Call) -> Response:
    call.identity.require_whole()
    if call.identity.queues:
        raise Problem(403, "this token is bound to queues, and this is about all of them")
    service = call.service
    page = await call.run(shown, service.meter.registry, service.gauges)
    return Response(page, media_type=CONTENT_TYPE_LATEST)


async def get_queue_metrics(call: Call) -> Response:
    call.identity.require_whole()
    name = str(call.request.path_params["queue"])
    call.identity.check_queue(name)
    return Json(await call.run(_of_queue, call, name))


def _of_queue(call: Call, name: str) -> dict[str, Any]:
    found = call.service.delayed.metrics(name)[name]
    return {"queue": name, "work": work(found), **asdict(found)}


OPERATIONS = [
    Operation(
        "GET",
        "/metrics",
        show_metrics,
        "read",
        "Metrics for Prometheus.",
        "queues",
        answers={200: None},
        answer_type="text/plain",
    ),
    Operation(
        "GET",
        "/v1/queues/{queue}/metrics",
        get_queue_metrics,
        "read",
        "What an autoscaler needs to know of a queue.",
        "queues",
        answers={200: QueueMetrics},
    ),
]
