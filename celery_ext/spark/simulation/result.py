"""Estimates for all messages from the simulated windows, with their errors."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kombu_delayed import sizing

from .load import GROUPS, Window
from .model import Fleet
from .queue import seconds_of
from .timeline import Point

PERCENTILES = {"p50_seconds": 0.5, "p95_seconds": 0.95, "p99_seconds": 0.99}

#: The group of windows that are always simulated; the others are a sample of the rest.
ALWAYS = 0


@dataclass(frozen=True)
class Found:
    """The results of the windows of one group."""

    messages: int = 0
    redelivered: int = 0
    lost: int = 0
    busy_seconds: float = 0.0
    max_seconds: float = 0.0


@dataclass(frozen=True)
class Result:
    """The figures of a simulation. Lateness is from the due time to the first start of a task.

    Each `…_error` is a standard error: None if all was simulated, or too little to estimate it.
    """

    messages: int
    simulated: int
    workers: int
    slots: int
    mean_seconds: float
    p50_seconds: float
    p50_error: float | None
    p95_seconds: float
    p95_error: float | None
    p99_seconds: float
    p99_error: float | None
    #: Of the simulated windows, which include the one with the longest wait.
    max_seconds: float
    redelivered: float
    #: Acked when they began and not run to their end.
    lost: float
    utilisation: float
    #: When the last message starts.
    ends_seconds: float
    busiest_rate: float
    most_messages: int
    most_bytes: int
    nodes: int
    shards: int
    nodes_because_of: str


def result(
    windows: Sequence[Window],
    simulated: Sequence[Window],
    found: Mapping[int, Found],
    classes: Mapping[int, Mapping[int, int]],
    points: Sequence[Point],
    busiest: float,
    fleet: Fleet,
) -> Result:
    """Estimate figures for all `windows` from those that were `simulated`, by their group.

    `classes` are messages by their class of lateness, `busiest` is the rate of the busiest minute.
    """
    total = sum(window.messages for window in windows)
    weights = _weights(total, found)
    memory = max(point.memory_bytes for point in points)
    node_bytes, has_events = fleet.node_memory_gib * 2**30, fleet.events > 0
    servers = sizing.servers_for(
        busiest, memory, node_bytes, has_events, fleet.use, fleet.record_bytes
    )
    ends = max(point.at_seconds for point in points) + points[1].at_seconds
    busy = _sum(weights, found, "busy_seconds")
    return Result(
        messages=total,
        simulated=sum(window.messages for window in simulated),
        workers=fleet.workers,
        slots=fleet.capacity,
        **_lateness(total, found, classes, weights),
        max_seconds=max(each.max_seconds for each in found.values()),
        redelivered=_sum(weights, found, "redelivered"),
        lost=_sum(weights, found, "lost"),
        utilisation=busy / (fleet.capacity * ends),
        ends_seconds=ends,
        busiest_rate=busiest,
        most_messages=round(max(point.delayed + point.ready for point in points)),
        most_bytes=round(memory),
        nodes=servers.nodes,
        shards=servers.shards,
        nodes_because_of=servers.because_of,
    )


def _lateness(
    total: int,
    found: Mapping[int, Found],
    classes: Mapping[int, Mapping[int, int]],
    weights: Mapping[int, float],
) -> dict[str, Any]:
    errors = _errors(total, found, classes)
    own = {f"{name[:3]}_error": error for name, error in errors.items()}
    counts = _counts(classes, weights)
    return {"mean_seconds": mean(counts), **_marks(counts), **own}


def _weights(total: int, found: Mapping[int, Found]) -> dict[int, float]:
    """How many messages one message of each group represents."""
    always = found[ALWAYS].messages if ALWAYS in found else 0
    sampled = sum(each.messages for group, each in found.items() if group != ALWAYS)
    weight = (total - always) / sampled if sampled else 1.0
    return {group: 1.0 if group == ALWAYS else weight for group in sorted(found)}


def _sum(weights: Mapping[int, float], found: Mapping[int, Found], name: str) -> float:
    return math.fsum(weight * getattr(found[group], name) for group, weight in weights.items())


def _counts(
    classes: Mapping[int, Mapping[int, int]], weights: Mapping[int, float]
) -> dict[int, float]:
    """Messages by their class of lateness."""
    counts: dict[int, float] = {}
    for group, weight in weights.items():
        for number, messages in classes[group].items():
            counts[number] = counts.get(number, 0.0) + weight * messages
    return counts


def _marks(counts: Mapping[int, float]) -> dict[str, float]:
    """Percentiles of lateness."""
    return {name: mark(counts, share) for name, share in PERCENTILES.items()}


def mean(counts: Mapping[int, float]) -> float:
    """The mean lateness, by classes."""
    late = math.fsum(seconds_of(number) * count for number, count in counts.items())
    return late / math.fsum(counts.values())


def mark(counts: Mapping[int, float], share: float) -> float:
    """The lateness that a share of the messages stays below, by their classes."""
    left = share * math.fsum(counts.values())
    ordered = sorted(counts)
    for number in ordered:
        left -= counts[number]
        if left <= 0:
            return seconds_of(number)
    return seconds_of(ordered[-1])


def _errors(
    total: int, found: Mapping[int, Found], classes: Mapping[int, Mapping[int, int]]
) -> dict[str, float | None]:
    """Standard errors, from the differences between the groups of the sample."""
    groups = [group for group in found if group != ALWAYS]
    if len(groups) < GROUPS:
        return dict.fromkeys(PERCENTILES)
    each = [
        _marks(
            _counts(classes, _weights(total, {g: found[g] for g in (ALWAYS, group) if g in found}))
        )
        for group in groups
    ]
    return {
        name: statistics.stdev(marks[name] for marks in each) / math.sqrt(len(groups))
        for name in PERCENTILES
    }
