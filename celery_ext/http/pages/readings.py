"""Readings of queues that several pages show, cached for all visitors."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from functools import partial

from celery_ext.control.counts import ConsumerInfo, Forecast
from celery_ext.tasks.times import EPOCH
from kombu_delayed.store.queue_metrics import Metrics, fold

from .visit import Visit

#: How old a reading may be.
COUNT_SECONDS, FORECAST_SECONDS = 1.0, 2.0


def metrics(visit: Visit, queue: str | None = None) -> Mapping[str, Metrics]:
    return {name: _metrics(visit, name) for name in visit.chosen_queues(queue)}


def _metrics(visit: Visit, queue: str) -> Metrics:
    store = visit.service.delayed.store
    return visit.service.cache.get(
        ("metrics", queue), COUNT_SECONDS, lambda: fold(map(store.metrics, store.shards.all(queue)))
    )


def consumers(visit: Visit, queue: str | None = None) -> list[ConsumerInfo]:
    """The consumers by queue, those whose leases end first in front."""
    store = visit.service.delayed.store
    found: list[ConsumerInfo] = []
    for name in visit.chosen_queues(queue):
        read = partial(ConsumerInfo.all_of, store, store.shards.all(name))
        found += visit.service.cache.get(("consumers", name), COUNT_SECONDS, read)
    return found


def forecast(visit: Visit, hours: float, buckets: int, queue: str | None = None) -> Forecast:
    """The forecast, in parts that begin at whole multiples of their length."""
    length = timedelta(hours=hours) / buckets
    start = EPOCH + (datetime.now(timezone.utc) - EPOCH) // length * length
    whole, delayed = Forecast.none(start, length, buckets), visit.service.delayed
    for name in visit.chosen_queues(queue):
        read = partial(delayed.forecast, hours, buckets, name, start)
        whole += visit.service.cache.get(("forecast", name, hours, start), FORECAST_SECONDS, read)
    return whole
