"""The parameters of a simulation: workers, servers and load."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from statistics import NormalDist
from typing import Any

from kombu_delayed import sizing
from kombu_delayed.connection.options import Options
from kombu_delayed.errors import OptionError

CONSTANT, EXPONENTIAL, LOGNORMAL = SPREADS = ("constant", "exponential", "lognormal")

_P95 = NormalDist().inv_cdf(0.95)

#: The highest ratio of the p95 of lognormal values to their mean.
_MOST_P95 = math.exp(_P95**2 / 2)

DAY_SECONDS = 86_400

#: A simulation is cut into slices of messages, which the driver has in its memory.
MOST_MESSAGES = 10_000_000_000


@dataclass(frozen=True)
class Spread:
    """Lengths of time in seconds by their mean; lognormal ones by their p95 as well."""

    kind: str
    mean: float
    p95: float | None = None

    @classmethod
    def of(cls, what: str, kind: str, mean: float, p95: float | None) -> Spread:
        """A spread that is possible. Raises OptionError."""
        if kind not in SPREADS:
            raise OptionError(f"{what}_spread is {', '.join(SPREADS)}, not {kind!r}")
        if kind != LOGNORMAL:
            if p95 is not None:
                raise OptionError(f"{what}_p95_seconds is for {what}_spread lognormal, not {kind}")
        elif p95 is None:
            raise OptionError(f"{what}_spread lognormal needs {what}_p95_seconds")
        elif not mean <= p95 <= mean * _MOST_P95:
            raise OptionError(
                f"{what}_p95_seconds of lognormal times is from 1 to {_MOST_P95:.2f} times their "
                f"mean, here {mean:g} to {mean * _MOST_P95:.3g}, not {p95:g}"
            )
        return cls(kind, mean, p95)

    @property
    def sigma(self) -> float:
        """The standard deviation of the logarithm of lognormal times."""
        ratio = (self.p95 or self.mean) / self.mean
        return _P95 - math.sqrt(max(_P95**2 - 2 * math.log(ratio), 0.0))

    @property
    def variation(self) -> float:
        """The variance over the square of the mean."""
        if self.kind == LOGNORMAL:
            return math.expm1(self.sigma**2)
        return 1.0 if self.kind == EXPONENTIAL else 0.0

    def sampler(self, dice: random.Random) -> Callable[[], float]:
        if self.kind == EXPONENTIAL:
            return partial(dice.expovariate, 1 / self.mean)
        if self.kind == LOGNORMAL:
            middle = math.log(self.mean) - self.sigma**2 / 2
            return partial(dice.lognormvariate, middle, self.sigma)
        return lambda: self.mean

    def beyond(self, seconds: float) -> float:
        """How much longer than `seconds` the lengths are, on average over all; 0 for shorter ones.

        Summed over time, the share of lengths that are longer. (For lognormal ones: the formula of
        Black and Scholes.)
        """
        if seconds <= 0:
            return self.mean - seconds
        if self.kind == EXPONENTIAL:
            return self.mean * math.exp(-seconds / self.mean)
        if self.kind == CONSTANT or self.sigma == 0:
            return max(self.mean - seconds, 0.0)
        far = math.log(self.mean / seconds) / self.sigma
        share = NormalDist().cdf
        return self.mean * share(far + self.sigma / 2) - seconds * share(far - self.sigma / 2)


def _number(default: Any, least: float, most: float, meaning: str) -> Any:
    return field(default=default, metadata={"meaning": meaning, "range": (least, most)})


def _choice(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"meaning": meaning})


def _check(given: Any) -> None:
    """Raise OptionError for a number that is out of its range."""
    for each in fields(given):
        value = getattr(given, each.name)
        if value is None or "range" not in each.metadata:
            continue
        least, most = each.metadata["range"]
        whole = isinstance(each.default, int)
        kind = "a whole number" if whole else "a number"
        right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not right or not least <= value <= most:
            raise OptionError(f"{each.name} is {kind} from {least:,} to {most:,}, not {value!r}")


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Workers, the run times of their tasks, and the broker's servers. Raises OptionError."""

    workers: int = _number(1, 1, 1_000_000, "Celery workers.")
    slots: int = _number(1, 1, 10_000, "Tasks that a worker runs at the same time (its -c).")
    prefetch_multiplier: int = _number(
        4, 1, 1_000, "Messages that a worker holds for each slot (worker_prefetch_multiplier)."
    )
    parts: int = _number(
        1, 1, 100_000, "Queues over which the load is spread; all workers consume each."
    )
    acks_late: bool = _choice(
        False, "Tasks are acked when they end: those that a dying worker ran run again."
    )
    run_seconds: float = _number(1.0, 0, 864_000, "How long tasks run on average.")
    run_spread: str = _choice(EXPONENTIAL, "How run times vary.")
    run_p95_seconds: float | None = _number(
        None, 0, 8_640_000, "The 95th percentile of lognormal run times."
    )
    crashes_per_day: float = _number(0.0, 0, 10_000, "How often a worker dies.")
    restart_seconds: float = _number(10.0, 0, 86_400, "How long until a dead worker is replaced.")
    lease_seconds: float = _number(
        Options().lease_seconds, 1, 86_400, "The transport option delayed_lease_seconds."
    )
    poll_seconds: float = _number(
        Options().poll_seconds, 0.1, 60, "The transport option delayed_poll_seconds."
    )
    nodes: int = _number(0, 0, 10_000, "Redis servers that share the load. 0: no limit.")
    node_memory_gib: float = _number(16.0, 0.1, 10_000, "Memory of one server.")
    use: float = _number(0.7, 0.05, 1, "The share of a server's memory and rate to plan with.")
    record_bytes: int = _number(
        sizing.RECORD_BYTES, 1, 100_000_000, "Size of a message with its headers and arguments."
    )
    events: int = _number(Options().events, 0, 100_000_000, "The transport option delayed_events.")
    seed: int = _number(
        1, 0, 2**63, "Seed of random numbers: the same seed gives the same results."
    )

    def __post_init__(self) -> None:
        _check(self)
        if not self.runs.mean > 0:
            raise OptionError(f"run_seconds is above 0, not {self.run_seconds!r}")
        if self.available <= 0:
            raise OptionError(
                f"a worker that dies {self.crashes_per_day:g} times a day and is away for "
                f"{self.restart_seconds:g} s each time gets no work done"
            )

    @property
    def runs(self) -> Spread:
        return Spread.of("run", self.run_spread, self.run_seconds, self.run_p95_seconds)

    @property
    def capacity(self) -> int:
        return self.workers * self.slots

    @property
    def prefetch(self) -> int:
        """The maximum number of unacknowledged messages of a worker."""
        return self.slots * self.prefetch_multiplier

    @property
    def crash_rate(self) -> float:
        return self.crashes_per_day / DAY_SECONDS

    @property
    def available(self) -> float:
        """The share of time in which a worker does useful work: it is up, and loses no task."""
        lost = (1 + self.runs.variation) * self.run_seconds / 2 if self.acks_late else 0.0
        return 1 - self.crash_rate * (self.restart_seconds + lost)

    @property
    def slot_seconds(self) -> float:
        return self.run_seconds + sizing.TASK_SECONDS

    @property
    def server_seconds(self) -> float:
        """How long the servers take for a message; 0 if they are no limit."""
        if not self.nodes:
            return 0.0
        return 1 / (self.nodes * sizing.node_rate(self.events > 0, self.record_bytes))

    @property
    def message_seconds(self) -> float:
        """The time between the starts of two tasks while all slots are busy."""
        return max(self.slot_seconds / (self.capacity * self.available), self.server_seconds)


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """A load given by numbers. Time 0 is midnight. Raises OptionError."""

    messages: int = _number(1, 1, MOST_MESSAGES, "The total number of messages.")
    hours: float = _number(24.0, 0.001, 8_784, "The period in which they are due, in hours.")
    peak: float = _number(
        1.0, 1, 2, "The rate at noon, relative to the mean; at midnight it is lower by as much."
    )
    on_the_hour: float = _number(0.0, 0, 1, "The share that is due exactly on the hour.")
    dispersion: float = _number(
        1.0,
        1,
        1_000,
        "The variance of counts of a second over their mean. 1: independent arrivals.",
    )
    delay_seconds: float | None = _number(
        None,
        0.001,
        31_622_400,
        "How long messages wait on average. Default: all wait from the beginning.",
    )
    delay_spread: str = _choice(EXPONENTIAL, "How delays vary.")
    delay_p95_seconds: float | None = _number(
        None, 0.001, 316_224_000, "The 95th percentile of lognormal delays."
    )

    def __post_init__(self) -> None:
        _check(self)
        _ = self.delays

    @property
    def seconds(self) -> float:
        return self.hours * 3600

    @property
    def delays(self) -> Spread | None:
        """From the schedule to the due time; None: scheduled before the simulation begins."""
        if self.delay_seconds is None:
            if self.delay_p95_seconds is not None:
                raise OptionError("delay_p95_seconds needs delay_seconds")
            return None
        return Spread.of("delay", self.delay_spread, self.delay_seconds, self.delay_p95_seconds)
