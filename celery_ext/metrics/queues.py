"""How full the queues are, asked of the broker whenever Prometheus asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kombu_delayed.store.queue_metrics import Metrics

from ..control.delayed import Delayed
from ..errors import BROKER_FAILS
from .names import BROKER, METRICS, PREFIX

#: Queues that are told of.
LIMIT = 1_000

Families = dict[str, GaugeMetricFamily]


class QueueCollector(Collector):
    """The gauges of some queues; `names` is asked anew each time."""

    def __init__(self, delayed: Delayed, names: Callable[[], Iterable[str]]) -> None:
        self._delayed, self._names = delayed, names

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Ask the broker. Where it does not answer, there is nothing but that.

        On a Cluster, queues whose node does not answer have no gauges.
        """
        families = _families()
        try:
            names, is_up = [*self._names()], 1
            for queue in names[:LIMIT]:
                try:
                    _add(families, queue, self._delayed.metrics(queue)[queue])
                except self._delayed.store.errors_of_one_queue:
                    is_up = 0
            families["queues_left_out"].add_metric([], max(len(names) - LIMIT, 0))
            families["broker_up"].add_metric([], is_up)
        except BROKER_FAILS:
            families = {"broker_up": _families()["broker_up"]}
            families["broker_up"].add_metric([], 0)
        yield from families.values()


def registry_of(delayed: Delayed, names: Callable[[], Iterable[str]]) -> CollectorRegistry:
    found = CollectorRegistry(auto_describe=False)
    found.register(QueueCollector(delayed, names))
    return found


def work(found: Metrics) -> int:
    """Messages that are to be dealt with within a minute."""
    return found.ready + found.due + found.unacked + found.due_within_minute


def _families() -> Families:
    return {
        metric.name: GaugeMetricFamily(PREFIX + metric.name, metric.meaning, labels=metric.labels)
        for metric in METRICS.values()
        if metric.source == BROKER
    }


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
