"""Counts what happens in this process, for Prometheus."""

from __future__ import annotations

import os
import re
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial, wraps
from typing import Any

from celery.utils.log import get_logger
from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Histogram,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector

from kombu_delayed.connection.forks import in_children
from kombu_delayed.connection.native import hand_over
from kombu_delayed.message.envelope import escaped
from kombu_delayed.store.calls import instrumentation
from kombu_delayed.store.calls.shards import queue_of

from .names import BROKER, METRICS, PREFIX, Metric

#: The variable that names the folder of prometheus_client's counts of several processes.
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"

#: How many values of one label are kept apart, and the name of all others.
VALUES, OTHER = 1_000, "other"

#: The label of queues of replies and results, whose names are ids, and the pattern of such names.
REPLIES = "replies"
_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}.*")

logger = get_logger(__name__)

_lock = threading.Lock()
_meters: dict[CollectorRegistry, PrometheusMeter] = {}


def measure(registry: CollectorRegistry = REGISTRY, *, by_task: bool = False) -> PrometheusMeter:
    """Start to measure this process, in a registry of prometheus_client.

    The metrics appear wherever that registry is exposed. Calling it twice is safe; only one
    registry is used at a time. With `by_task`, started and finished tasks are also counted by task
    name. A child process must call this itself.
    """
    with _lock:
        if registry not in _meters:
            _meters[registry] = PrometheusMeter(registry)
        found = _meters[registry]
        found.by_task = found.by_task or by_task
        instrumentation.current = found
        return found


#: Held while something is counted, so that no fork happens then: a lock of prometheus_client would
#: stay locked in the child.
_whole = threading.RLock()

#: Threads that are counting, and the counts that signal handlers have added meanwhile.
_counting: set[int] = set()
_put_off: deque[Callable[[], None]] = deque()


def _forget_parents() -> None:
    """Forget the parent's threads in a child, where other threads may have their numbers."""
    _counting.clear()
    _put_off.clear()
    if MULTIPROCESS not in os.environ:
        instrumentation.current = None


in_children(_forget_parents, _whole)


def _safely(count: Callable[..., None]) -> Callable[..., None]:
    """Log errors of counting: a full disk with counts, for example, must not cost a message.

    A signal handler, which may interrupt this thread in a lock of prometheus_client, counts later.
    """

    @wraps(count)
    def counted(*given: Any) -> None:
        if hand_over(counted, *given):
            return
        thread = threading.get_ident()
        if thread in _counting:
            _put_off.append(partial(count, *given))
            return
        _counting.add(thread)
        try:
            with _whole:
                count(*given)
                while _put_off:
                    with suppress(IndexError):  # another thread has taken it
                        _put_off.popleft()()
        except Exception as error:
            logger.warning("A metric was not counted: %s", error)
        finally:
            _counting.discard(thread)

    return counted


class PrometheusMeter(instrumentation.Meter):
    """A meter whose counts are in a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.by_task = False
        made: dict[str, Any] = {
            name: _made(metric, registry)
            for name, metric in METRICS.items()
            if metric.source != BROKER
        }
        self._made = made
        self._children: dict[tuple[str, ...], Any] = {}
        self._values: dict[str, set[str]] = {"queue": set(), "task": set()}
        self._leases_lost = made["leases_lost_total"]
        self._outcomes_dropped = made["outcomes_dropped_total"]

    def _of(self, name: str, *values: str) -> Any:
        """One metric with its labels, cached because prometheus_client is slow to find them."""
        key = (name, *values)
        found = self._children.get(key)
        if found is None:
            bounded = tuple(map(self._bounded, METRICS[name].labels, values))
            found = self._made[name].labels(*bounded)
            if bounded == values:
                self._children[key] = found
        return found

    def _bounded(self, label: str, value: str) -> str:
        known, value = self._values.get(label), escaped(str(value))
        if known is None or value in known:
            return value
        if label == "queue" and _ID.fullmatch(value):
            return REPLIES
        if len(known) >= VALUES:
            return OTHER
        known.add(value)
        return value

    @_safely
    def scheduled(self, queue: str, count: int) -> None:
        self._of("scheduled_total", queue_of(queue)).inc(count)

    @_safely
    def consuming(self, queue: str) -> None:
        """Show zeros, because Prometheus sees no increase from a missing value to the first."""
        for name in ("delivered", "redelivered", "reclaimed", "buried"):
            self._of(f"{name}_total", queue_of(queue))

    @_safely
    def delivered(self, queue: str, late_seconds: float | None, deliveries: int) -> None:
        name = queue_of(queue)
        self._of("delivered_total", name).inc()
        if deliveries:
            self._of("redelivered_total", name).inc()
        if late_seconds is not None:
            self._of("delivery_lateness_seconds", name).observe(max(late_seconds, 0))

    @_safely
    def reclaimed(self, queue: str, count: int) -> None:
        self._of("reclaimed_total", queue_of(queue)).inc(count)

    @_safely
    def buried(self, queue: str, count: int) -> None:
        self._of("buried_total", queue_of(queue)).inc(count)

    @_safely
    def lease_lost(self) -> None:
        self._leases_lost.inc()

    @_safely
    def script_took(self, name: str, seconds: float) -> None:
        self._of("script_seconds", name).observe(seconds)

    @_safely
    def started(self, queue: str, task: str, late_seconds: float | None) -> None:
        """Count a task that has started, and how late. None if it was never delayed."""
        self._of("started_total", queue, self._shown(task)).inc()
        if late_seconds is not None:
            self._of("start_lateness_seconds", queue).observe(max(late_seconds, 0))

    @_safely
    def finished(self, queue: str, task: str, state: str) -> None:
        self._of("finished_total", queue, self._shown(task), state).inc()

    @_safely
    def ran(self, queue: str, task: str, seconds: float) -> None:
        """Count how long a task has run."""
        self._of("run_seconds", queue, self._shown(task)).observe(max(seconds, 0))

    @_safely
    def outcomes_dropped(self, count: int) -> None:
        self._outcomes_dropped.inc(count)

    def _shown(self, task: str) -> str:
        return task if self.by_task else ""

    @_safely
    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count an HTTP request. Its method and route have few known values."""
        self._of("http_requests_total", method, route, str(status)).inc()
        self._of("http_request_seconds", method, route).observe(seconds)


_KINDS: Mapping[str, Any] = {"counter": Counter, "histogram": Histogram}


def _made(metric: Metric, registry: CollectorRegistry) -> Any:
    more = {"buckets": metric.bounds} if metric.bounds else {}
    return _KINDS[metric.kind](
        PREFIX + metric.name, metric.meaning, metric.labels, registry=registry, **more
    )


def shown(registry: CollectorRegistry, *others: CollectorRegistry) -> bytes:
    """The page for Prometheus: registries one after the other, in its text format.

    If the variable PROMETHEUS_MULTIPROC_DIR is set, the first is that of all processes which write
    there, such as the children of a pool.
    """
    if MULTIPROCESS in os.environ:
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
    return b"".join(map(generate_latest, (registry, *others)))
