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
from ..operations import Call, Operations

operations = Operations("queues")


@operations.add("GET", "/metrics", "read", None, answer_type="text/plain")
def show_metrics(call: Call) -> Response:
    """Metrics for Prometheus."""
    call.identity.require_whole()
    if call.identity.queues:
        raise Problem(403, "this token is restricted to queues, and this covers all queues")
    service = call.service
    page = shown(service.meter.registry, service.gauges)
    return Response(page, media_type=CONTENT_TYPE_LATEST)


@operations.add("GET", "/v1/queues/{queue}/metrics", "read", QueueMetrics)
def get_queue_metrics(call: Call) -> dict[str, Any]:
    """Metrics of a queue for autoscalers."""
    call.identity.require_whole()
    name = call.queue
    found = call.service.delayed.metrics(name)[name]
    return {"queue": name, "work": work(found), **asdict(found)}
