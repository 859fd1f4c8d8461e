"""The course of a simulated load: delayed and ready messages, and memory in Redis, over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kombu_delayed import sizing

from .load import Slice
from .model import Arrivals, Fleet, Spread

#: Points in time of the course.
POINTS = 1440

#: In seconds.
MINUTE = 60.0

#: How many periods of a load are repeated in detail; later messages are spread evenly.
_PERIODS = 100


class Point(NamedTuple):
    """A moment and the time until the next one. Times in seconds, rates in messages a second."""

    at_seconds: float
    due_rate: float
    start_rate: float
    wait_seconds: float
    delayed: float
    ready: float
    memory_bytes: float


def timeline(
    slices: Sequence[Slice], waits: Sequence[float], fleet: Fleet, arrivals: Arrivals | None
) -> list[Point]:
    """A load over time, until the last message has started.

    Without `arrivals`, or without delays in them, all messages wait from the start. With delays,
    the same load repeats before and after.
    """
    due, started = list(_due(slices)), list(_started(slices, waits, fleet))
    span = arrivals.seconds if arrivals else due[-1][0]
    length = max(span, started[-1][0], 1.0) / POINTS
    times = [n * length for n in range(POINTS + 1)]
    due_at, started_at = _at(due, times), _at(started, times)
    longest = _longest(slices, waits, fleet, length)
    delays = arrivals.delays if arrivals else None
    delayed = _repeated(due, delays, length, span) if delays else [due[-1][1] - at for at in due_at]
    points = []
    for n in range(POINTS):
        ready = max(due_at[n + 1] - started_at[n + 1], 0.0)
        memory = sizing.memory_bytes(delayed[n] + ready, fleet.record_bytes, fleet.events)
        rates = ((due_at[n + 1] - due_at[n]) / length, (started_at[n + 1] - started_at[n]) / length)
        points.append(Point(times[n], *rates, longest[n], delayed[n], ready, memory))
    return points


def busiest_rate(slices: Sequence[Slice], waits: Sequence[float], fleet: Fleet) -> float:
    """Messages per second that start in the busiest minute."""
    started = list(_started(slices, waits, fleet))
    # The busiest minute begins or ends where the rate changes.
    begins = sorted({max(at - ahead, 0.0) for at, _ in started for ahead in (0.0, MINUTE)})
    ends = _at(started, [at + MINUTE for at in begins])
    counts = zip(_at(started, begins), ends, strict=True)
    return max(last - first for first, last in counts) / MINUTE


def _due(slices: Sequence[Slice]) -> Iterator[tuple[float, float]]:
    total = 0
    yield 0.0, 0.0
    for part in slices:
        yield part.at, total
        total += part.messages
        yield part.at + part.span_seconds, total


def _started(
    slices: Sequence[Slice], waits: Sequence[float], fleet: Fleet
) -> Iterator[tuple[float, float]]:
    total = 0
    yield 0.0, 0.0
    for part, wait in zip(slices, waits, strict=False):
        yield part.at + wait, total
        total += part.messages
        yield part.at + max(wait + part.messages * fleet.message_seconds, part.span_seconds), total


def _at(curve: Sequence[tuple[float, float]], times: Sequence[float]) -> list[float]:
    """The values of a non-decreasing, piecewise linear curve at sorted times."""
    found, number = [], 0
    for time in times:
        while number + 1 < len(curve) and curve[number + 1][0] <= time:
            number += 1
        (before, low), (after, high) = curve[number], curve[min(number + 1, len(curve) - 1)]
        share = (time - before) / (after - before) if after > before else 0.0
        found.append(low + (high - low) * min(max(share, 0.0), 1.0))
    return found


def _longest(
    slices: Sequence[Slice], waits: Sequence[float], fleet: Fleet, length: float
) -> list[float]:
    """The longest wait of messages due in each part: that of a slice's first or last one."""
    found = [0.0] * POINTS
    for part, wait in zip(slices, waits, strict=False):
        number = min(int(part.at / length), POINTS - 1)
        last = wait + part.messages * fleet.message_seconds - part.span_seconds
        found[number] = max(found[number], wait, last)
    return found


def _repeated(
    due: Sequence[tuple[float, float]], delays: Spread, length: float, span: float
) -> list[float]:
    """The delayed messages at each point, for a load that repeats without end."""
    period = max(round(span / length), 1)
    part = span / period
    due_at = _at(due, [n * part for n in range(period + 1)])
    counts = [due_at[n + 1] - due_at[n] for n in range(period)]
    shares = [_scheduled(delays, lag * part, part, span) for lag in range(period)]
    one = [
        sum(counts[(n + lag) % period] * shares[lag] for lag in range(period))
        for n in range(period)
    ]
    return [one[n % period] for n in range(POINTS)]


def _scheduled(delays: Spread, lag: float, part: float, span: float) -> float:
    """The share of the messages of a part, which begins `lag` ahead, that is scheduled by now.

    Summed over this period and all later ones.
    """
    total = 0.0
    for period in range(_PERIODS):
        begin = lag + period * span
        total += (delays.beyond(begin) - delays.beyond(begin + part)) / part
    return total + delays.beyond(lag + part / 2 + (_PERIODS - 0.5) * span) / span
