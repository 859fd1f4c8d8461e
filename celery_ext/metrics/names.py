"""Every metric: its name, its labels and what it tells. The reference page is made from this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: In front of all names.
PREFIX = "kombu_delayed_"

#: Who tells a metric.
PROCESS, WORKERS, API, BROKER = "each process", "workers", "the HTTP API", "the broker"

#: Upper bounds in seconds. Lateness may be that of an outage; scripts take parts of a millisecond.
LATENESS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1_800, 7_200)
RUNS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1_800, 7_200)
CALLS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1, 5)
REQUESTS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 30)


@dataclass(frozen=True)
class Metric:
    """One metric. `source` says who tells it; a histogram has `bounds`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    source: str
    meaning: str
    bounds: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        """As Prometheus shows it."""
        return PREFIX + self.name


def _counter(name: str, source: str, labels: str, meaning: str) -> Metric:
    return Metric(f"{name}_total", "counter", tuple(labels.split()), source, meaning)


def _gauge(name: str, meaning: str, labels: str = "queue") -> Metric:
    return Metric(name, "gauge", tuple(labels.split()), BROKER, meaning)


def _times(name: str, source: str, labels: str, bounds: tuple[float, ...], meaning: str) -> Metric:
    return Metric(f"{name}_seconds", "histogram", tuple(labels.split()), source, meaning, bounds)


_ALL = (
    _counter("scheduled", PROCESS, "queue", "Messages put into the backlog."),
    _counter("delivered", WORKERS, "queue", "Messages given to a worker, or to who polls by HTTP."),
    _counter("redelivered", WORKERS, "queue", "Of these, those that came in vain before."),
    _times(
        "delivery_lateness",
        WORKERS,
        "queue",
        LATENESS,
        "From the due time of a delayed message to its delivery, by the server's clock.",
    ),
    _counter("started", WORKERS, "queue task", "Tasks that a pool has begun."),
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
        "From the start of a task to its end, however it has ended.",
    ),
    _counter(
        "outcomes_dropped",
        WORKERS,
        "",
        "Events of tasks that found no room to be recorded, while Redis was slow or away.",
    ),
    _counter("buried", WORKERS, "queue", "Messages that have become dead letters."),
    _counter("reclaimed", WORKERS, "queue", "Messages taken back from consumers that had died."),
    _counter("leases_lost", WORKERS, "", "Times that a consumer found its lease ended."),
    _times(
        "script",
        PROCESS,
        "script",
        CALLS,
        "Calls of Lua scripts that were waited for, with the way there and back; those in "
        "pipelines are not.",
    ),
    _counter("http_requests", API, "method route status", "Requests that were answered."),
    _times("http_request", API, "method route", REQUESTS, "Time of a request to its last byte."),
    _gauge("delayed_messages", "Messages in the backlog, due or not."),
    _gauge("due_messages", "Of these, those whose due time has come."),
    _gauge("waiting_messages", "Of the due ones, those that wait for their turn or for a limit."),
    _gauge("oldest_waiting_seconds", "How long ago the first of those was due that wait."),
    _gauge("ready_messages", "Messages in the ready lists."),
    _gauge("unacked_messages", "Messages that consumers hold."),
    _gauge("dead_messages", "Dead letters."),
    _gauge(
        "due_within_messages",
        "Messages that are not due yet and will be within the `horizon`: `minute`, `hour` or "
        "`day`. The hour has those of the minute.",
        "queue horizon",
    ),
    _gauge(
        "work_messages",
        "What is to be done within a minute: ready, due, unacked, and due within it.",
    ),
    _gauge("oldest_due_seconds", "How long ago the oldest message was due that no consumer has."),
    _gauge("next_due_seconds", "Until the next message is due; absent where there is none."),
    _gauge("consumers", "Consumers whose lease lasts."),
    _gauge("counts_are_estimates", "1 where so much is due that a part of it was estimated."),
    _gauge("broker_up", "Whether the broker has answered this time; 0: the gauges are absent.", ""),
)

METRICS = {metric.name: metric for metric in _ALL}
