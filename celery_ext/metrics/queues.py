"""How full the queues are, read from the broker at each scrape of Prometheus."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from celery.utils.log import get_logger
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kombu_delayed.errors import WrongType
from kombu_delayed.store.queue_metrics import Metrics

from ..control.delayed import Delayed
from ..errors import BROKER_FAILS
from .names import BROKER, METRICS, PREFIX

#: How many queues have gauges.
LIMIT = 1_000

#: How long a scrape waits for the broker. Prometheus itself waits for 10 s.
SECONDS = 5.0

logger = get_logger(__name__)

Families = dict[str, GaugeMetricFamily]


class QueueCollector(Collector):
    """The gauges of some queues; `names` is called at each scrape."""

    def __init__(
        self, delayed: Delayed, names: Callable[[], Iterable[str]], seconds: float
    ) -> None:
        self._delayed, self._names, self._seconds = delayed, names, seconds
        self._lock = threading.Lock()
        self._reading: _Reading | None = None

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Read from the broker. If it does not answer in time, the only gauge says so.

        Queues whose keys another program has overwritten have no gauges, nor have those of a
        Cluster whose node refuses connections.
        """
        with self._lock:
            if self._reading is None or not self._reading.is_alive():
                self._reading = _Reading(self._read)
                self._reading.start()
            reading = self._reading
        reading.join(self._seconds)
        yield from reading.families.values()

    def _read(self) -> Families:
        families = _families()
        try:
            names, is_up = [*self._names()], 1
            for queue in names[:LIMIT]:
                try:
                    _add(families, queue, self._delayed.metrics(queue)[queue])
                except WrongType as error:
                    logger.warning("There are no gauges of queue %s: %s", queue, error)
                except self._delayed.errors_of_one_queue:
                    is_up = 0
            families["queues_left_out"].add_metric([], max(len(names) - LIMIT, 0))
            families["broker_up"].add_metric([], is_up)
        except BROKER_FAILS:
            return _down()
        return families


class _Reading(threading.Thread):
    """Reads the gauges once. While the broker has not answered, they say that it is down."""

    def __init__(self, read: Callable[[], Families]) -> None:
        super().__init__(name="delayed-gauges", daemon=True)
        self._read, self.families = read, _down()

    def run(self) -> None:
        self.families = self._read()


def registry_of(
    delayed: Delayed, names: Callable[[], Iterable[str]], seconds: float = SECONDS
) -> CollectorRegistry:
    """The gauges of some queues. A scrape waits up to `seconds` for the broker."""
    found = CollectorRegistry(auto_describe=False)
    found.register(QueueCollector(delayed, names, seconds))
    return found


def work(found: Metrics) -> int:
    """The number of messages to process within a minute."""
    return found.ready + found.due + found.unacked + found.due_within_minute


def _families() -> Families:
    return {
        metric.name: GaugeMetricFamily(PREFIX + metric.name, metric.meaning, labels=metric.labels)
        for metric in METRICS.values()
        if metric.source == BROKER
    }


def _down() -> Families:
    found = _families()["broker_up"]
    found.add_metric([], 0)
    return {"broker_up": found}


def _add(families: Families, queue: str, found: Metrics) -> None:
    values = {
        "delayed_messages": found.delayed,
        "due_messages": found.due,
        "waiting_messages": found.waiting,
        "oldest_waiting_seconds": found.oldest_waiting_seconds,
        "ready_messages": found.ready,
        "unacked_messages": found.unacked,
        "dead_messages": found.dead,
        "work_messages": work(found),
        "oldest_due_seconds": found.oldest_due_seconds,
        "next_due_seconds": found.next_due_seconds,
        "consumers": found.consumers,
        "paused": int(found.paused),
        "counts_are_estimates": int(found.is_estimate),
    }
    for name, value in values.items():
        if value is not None:
            families[name].add_metric([queue], value)
    for horizon in ("minute", "hour", "day"):
        count = getattr(found, f"due_within_{horizon}")
        families["due_within_messages"].add_metric([queue, horizon], count)
