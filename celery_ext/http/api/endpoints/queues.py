"""Queues as a whole: counts, forecast, consumers."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from typing import Any

from starlette.responses import Response

from celery_ext.control.counts import ConsumerInfo, Counts, Forecast, forecast_data

from ..models import Consumers, ForecastAnswer, ForecastQuery, OneQueue, QueueCounts, Queues
from ..operations import Call, Json, Operation


async def list_queues(call: Call) -> Response:
    call.identity.require_whole()
    return Json(await call.run(_counts, call, None))


def _counts(call: Call, queue: str | None) -> dict[str, Any]:
    names = call.service.queues(call.identity, queue)
    return {"queues": [_of_queue(call, name) for name in names]}


def _of_queue(call: Call, name: str) -> dict[str, Any]:
    store = call.service.delayed.store
    return {"queue": name, **asdict(Counts.of(store, store.shards.all(name)))}


async def get_queue(call: Call) -> Response:
    call.identity.require_whole()
    name = str(call.request.path_params["queue"])
    call.identity.check_queue(name)
    return Json(await call.run(_of_queue, call, name))


async def get_forecast(call: Call) -> Response:
    call.identity.require_whole()
    return Json(await call.run(_forecast, call, call.query))


def _forecast(call: Call, query: ForecastQuery) -> dict[str, Any]:
    start = datetime.now(timezone.utc)
    length = timedelta(hours=query.hours) / query.buckets
    whole = Forecast.none(start, length, query.buckets)
    for name in call.service.queues(call.identity, query.queue):
        whole += call.service.delayed.forecast(query.hours, query.buckets, name, start)
    return forecast_data(whole)


async def list_consumers(call: Call) -> Response:
    call.identity.require_whole()
    return Json(await call.run(_consumers, call, call.query.queue))


def _consumers(call: Call, queue: str | None) -> dict[str, Any]:
    store = call.service.delayed.store
    found = [
        asdict(info)
        for name in call.service.queues(call.identity, queue)
        for info in ConsumerInfo.all_of(store, store.shards.all(name))
    ]
    return {"consumers": found}


OPERATIONS = [
    Operation(
        "GET",
        "/v1/queues",
        list_queues,
        "read",
        "Count messages by queue and state.",
        "queues",
        answers={200: Queues},
    ),
    Operation(
        "GET",
        "/v1/queues/{queue}",
        get_queue,
        "read",
        "Count a queue's messages by state.",
        "queues",
        answers={200: QueueCounts},
    ),
    Operation(
        "GET",
        "/v1/forecast",
        get_forecast,
        "read",
        "How many tasks are due when.",
        "queues",
        query=ForecastQuery,
        answers={200: ForecastAnswer},
    ),
    Operation(
        "GET",
        "/v1/consumers",
        list_consumers,
        "read",
        "Who consumes, and what is held.",
        "queues",
        query=OneQueue,
        answers={200: Consumers},
    ),
]
