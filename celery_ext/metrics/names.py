"""Every metric: its name, its labels and its meaning. The reference page is made from this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: The prefix of all names.
PREFIX = "kombu_delayed_"

#: The sources of metrics.
PROCESS, WORKERS, API, BROKER = "each process", "workers", "the HTTP API", "the broker"

#: Upper bounds in seconds. Lateness may be that of an outage; scripts take parts of a millisecond.
LATENESS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1_800, 7_200)
RUNS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1_800, 7_200)
CALLS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1, 5)
REQUESTS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 30)


@dataclass(frozen=True)
class Metric:
    """One metric. `source` is what reports it; a histogram has `bounds`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    source: str
    meaning: str
    bounds: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        """The name in Prometheus."""
        return PREFIX + self.name


def _counter(name: str, source: str, labels: str, meaning: str) -> Metric:
    return Metric(f"{name}_total", "counter", tuple(labels.split()), source, meaning)


def _gauge(name: str, meaning: str, labels: str = "queue") -> Metric:
    return Metric(name, "gauge", tuple(labels.split()), BROKER, meaning)


def _times(name: str, source: str, labels: str, bounds: tuple[float, ...], meaning: str) -> Metric:
    return Metric(f"{name}_seconds", "histogram", tuple(labels.split()), source, meaning, bounds)


_ALL = (
    _counter("scheduled", PROCESS, "queue", "Messages put into the backlog."),
    _counter(
        "delivered",
        WORKERS,
        "queue",
        "Messages delivered to a worker, or to an HTTP client that polls.",
    ),
    _counter(
        "redelivered",
        WORKERS,
        "queue",
        "Deliveries of messages that had been delivered before.",
    ),
    _times(
        "delivery_lateness",
        WORKERS,
        "queue",
        LATENESS,
        "From the due time of a delayed message to its delivery, by the server's clock.",
    ),
    _counter("started", WORKERS, "queue task", "Tasks that a pool has started."),
    _times(
        "start_lateness",
        WORKERS,
        "queue",
        LATENESS,
        "From the due time of a delayed message to the start of its task, by the worker's clock.",
    ),
    _counter(
        "finished",
        WORKERS,
        "queue task state",
        "Tasks that have ended: `success`, `failure`, `retry`, `timeout`, `rejected`, `ignored`, "
        "`revoked` or `expired`.",
    ),
    _times(
        "run",
        WORKERS,
        "queue task",
        RUNS,
        "From the start of a task to its end, with any outcome.",
    ),
    _counter(
        "outcomes_dropped",
        WORKERS,
        "",
        "Task events that were dropped because Redis was slow or unreachable.",
    ),
    _counter("buried", WORKERS, "queue", "Messages that have become dead letters."),
    _counter("reclaimed", WORKERS, "queue", "Messages reclaimed from dead consumers."),
    _counter("leases_lost", WORKERS, "", "How often a consumer found that its lease had expired."),
    _times(
        "script",
        PROCESS,
        "script",
        CALLS,
        "Duration of calls of Lua scripts, with network time, except calls in pipelines.",
    ),
    _counter("http_requests", API, "method route status", "Answered requests."),
    _times(
        "http_request", API, "method route", REQUESTS, "Duration of a request to its last byte."
    ),
    _gauge("delayed_messages", "Messages in the backlog, due or not."),
    _gauge("due_messages", "Messages in the backlog that are due."),
    _gauge("waiting_messages", "Due messages that wait for their turn or for a limit."),
    _gauge("oldest_waiting_seconds", "How long ago the first waiting message was due."),
    _gauge("ready_messages", "Messages in the ready lists."),
    _gauge("unacked_messages", "Messages that consumers hold."),
    _gauge("dead_messages", "Dead letters."),
    _gauge(
        "due_within_messages",
        "Messages that are not due yet and will be within the `horizon`: `minute`, `hour` "
        "or `day`. The hour includes the minute.",
        "queue horizon",
    ),
    _gauge(
        "work_messages",
        "The work of the next minute: ready, due, unacked, and due within it.",
    ),
    _gauge("oldest_due_seconds", "How long ago the oldest message without a consumer was due."),
    _gauge("next_due_seconds", "Time until the next message is due; absent if there is none."),
    _gauge("consumers", "Consumers with a valid lease."),
    _gauge("paused", "1 if the queue is paused."),
    _gauge("counts_are_estimates", "1 if there are so many messages that a part was estimated."),
    _gauge("queues_left_out", "Queues beyond the first thousand, which have no gauges.", ""),
    _gauge(
        "broker_up",
        "Whether the broker answered this scrape; 0: gauges are absent, on a Cluster those of the "
        "queues whose node is down.",
        "",
    ),
)

METRICS = {metric.name: metric for metric in _ALL}
