"""Queues as a whole: counts, forecast, consumers, and metrics."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from celery_ext.control.counts import ConsumerInfo, Counts, Forecast, forecast_data
from celery_ext.metrics.measuring import shown
from celery_ext.metrics.queues import work

from ..models import (
    Consumers,
    ForecastAnswer,
    ForecastQuery,
    OneQueue,
    QueueCounts,
    QueueMetrics,
    Queues,
)
from ..operations import Call, Operations

operations = Operations("queues")


@operations.add("GET", "/v1/queues", "read", Queues)
def list_queues(call: Call) -> dict[str, Any]:
    """Count messages by queue and state."""
    call.identity.require_whole()
    return {"queues": [_of_queue(call, name) for name in call.service.queues(call.identity)]}


def _of_queue(call: Call, name: str) -> dict[str, Any]:
    store = call.service.delayed.store
    return {"queue": name, **asdict(Counts.of(store, store.shards.all(name)))}


@operations.add("GET", "/v1/queues/{queue}", "read", QueueCounts)
def get_queue(call: Call) -> dict[str, Any]:
    """Count a queue's messages by state."""
    call.identity.require_whole()
    return _of_queue(call, call.queue)


@operations.add("GET", "/v1/forecast", "read", ForecastAnswer, query=ForecastQuery)
def get_forecast(call: Call) -> dict[str, Any]:
    """The number of tasks that become due in each interval."""
    call.identity.require_whole()
    query: ForecastQuery = call.query
    start = datetime.now(timezone.utc)
    length = timedelta(hours=query.hours) / query.buckets
    whole = Forecast.none(start, length, query.buckets)
    for name in call.service.queues(call.identity, query.queue):
        whole += call.service.delayed.forecast(query.hours, query.buckets, name, start)
    return forecast_data(whole)


@operations.add("GET", "/v1/consumers", "read", Consumers, query=OneQueue)
def list_consumers(call: Call) -> dict[str, Any]:
    """Consumers, and how many messages each holds."""
    call.identity.require_whole()
    store = call.service.delayed.store
    found = [
        asdict(info)
        for name in call.service.queues(call.identity, call.query.queue)
        for info in ConsumerInfo.all_of(store, store.shards.all(name))
    ]
    return {"consumers": found}


@operations.add("GET", "/metrics", "read", None, answer_type="text/plain")
def show_metrics(call: Call) -> Response:
    """Metrics for Prometheus."""
    call.identity.require_whole()
    call.identity.require_all_queues()
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
