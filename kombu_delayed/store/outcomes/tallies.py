"""Counts over time, made by workers: how many tasks ended in which way, how late, how long."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from ...connection.commands import pairs
from ..calls.caller import chunks, without_errors
from ..calls.scripts import Call
from ..store import Store


class Level(NamedTuple):
    """The length of a slot in seconds, and of all slots in one hash."""

    slot: int
    span: int


#: The last hour by minutes, the last day by quarters of an hour, the last week by two hours.
LEVELS = {"hour": Level(60, 3_600), "day": Level(900, 86_400), "week": Level(7_200, 604_800)}

#: The upper bounds of the counted classes of times, in ms; one more class is above the last.
BOUNDS_MS = (1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)

#: The ends that are counted, by the name of the outcome in its record.
ENDS = {"+": 0, "-": 1, "~": 2, "x": 3}

_TIMES = len(BOUNDS_MS) + 1
#: The positions of run times and lateness in the numbers of a task: each is a sum, then counts.
_RUNS, _LATE = len(ENDS), len(ENDS) + 1 + _TIMES
_SIZE = _LATE + 1 + _TIMES

#: How many minutes of tasks a worker remembers while it cannot reach Redis.
MOST = 5_000


@dataclass
class Tally:
    """The counts of tasks in one slot of time."""

    numbers: list[int] = field(default_factory=lambda: [0] * _SIZE)

    def __add__(self, other: Tally) -> Tally:
        return Tally([a + b for a, b in zip(self.numbers, other.numbers, strict=True)])

    @classmethod
    def of(cls, text: bytes) -> Tally:
        """Read the form in Redis; a version with more numbers may have written it."""
        numbers = [*map(int, text.split())][:_SIZE]
        return cls(numbers + [0] * (_SIZE - len(numbers)))

    @property
    def ended(self) -> int:
        """Attempts that succeeded, failed, or will be retried."""
        return sum(self.numbers[:3])

    def end(self, state: str) -> int:
        """How many attempts ended in this way, one of `ENDS`."""
        return self.numbers[ENDS[state]]

    def run_seconds(self, share: float) -> float | None:
        """About the longest run time within this share of attempts; None if nothing has ended."""
        return _quantile(self.numbers[_RUNS + 1 : _LATE], share)

    def late_seconds(self, share: float) -> float | None:
        """As `run_seconds`, for the time from the due time of a delayed task until it began."""
        return _quantile(self.numbers[_LATE + 1 :], share)

    @property
    def mean_run_seconds(self) -> float | None:
        """The mean run time; None if nothing has ended."""
        count = sum(self.numbers[_RUNS + 1 : _LATE])
        return self.numbers[_RUNS] / count / 1000 if count else None

    def add_time(self, at: int, ms: float) -> None:
        self.numbers[at] += int(ms)
        self.numbers[at + 1 + bisect_right(BOUNDS_MS, ms)] += 1


def _quantile(counts: Sequence[int], share: float) -> float | None:
    total = sum(counts)
    if not total:
        return None
    wanted = share * total
    for n, reached in enumerate(accumulate(counts)):
        if counts[n] and reached >= wanted:
            low, high = (0, *BOUNDS_MS)[n], (*BOUNDS_MS, 3 * BOUNDS_MS[-1])[n]
            part = (wanted - (reached - counts[n])) / counts[n]
            return (low + (high - low) * part) / 1000
    return None


class Tallies:
    """The counts of a worker for one queue, until they are in Redis. Not thread-safe."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, str], Tally] = {}
        self._sent: list[tuple[int, Sequence[str | int]]] = []
        self._number = 0

    def began(self, task: str, at: float, late_ms: float) -> None:
        """Count the start of a delayed task, `late_ms` after its due time."""
        if (tally := self._tally(task, at)) is not None:
            tally.add_time(_LATE, max(late_ms, 0))

    def ended(self, task: str, at: float, state: str, run_ms: float | None) -> None:
        """Count the end of a task; `state` is one of `ENDS`."""
        if (tally := self._tally(task, at)) is not None:
            tally.numbers[ENDS[state]] += 1
            if run_ms is not None:
                tally.add_time(_RUNS, run_ms)

    def _tally(self, task: str, at: float) -> Tally | None:
        key = int(at) // 60 * 60, task
        tally = self._counts.get(key)
        if tally is None and len(self._counts) < MOST:
            tally = self._counts[key] = Tally()
        return tally

    def calls(self, store: Store, queue: str, worker: str) -> list[Call]:
        """The scripts that add the counts; the same scripts again until `were_written`."""
        if not self._sent:
            counts, self._counts = [*self._counts.items()], {}
            for part in chunks(counts):
                self._number += 1
                entries = [
                    each
                    for (at, task), tally in part
                    for each in (at, task, " ".join(map(str, tally.numbers)))
                ]
                self._sent.append((self._number, entries))
        levels = " ".join(f"{each.slot}:{each.span}" for each in LEVELS.values())
        return [
            store.call("tally", queue, worker=worker, number=n, levels=levels, entries=entries)
            for n, entries in self._sent
        ]

    def were_written(self) -> None:
        """Forget the last calls, which have run."""
        self._sent = []


class Slot(NamedTuple):
    """The counts of the tasks of a name in a slot of time, which begins `at` s since the epoch."""

    queue: str
    at: int
    task: str
    tally: Tally


def slots(store: Store, queues: Sequence[str], level: str, now: float) -> Iterator[Slot]:
    """The counts of the last hour, day or week. A queue is one shard."""
    size, span = LEVELS[level]
    first = int(now) // size * size - span + size
    places = [(queue, period) for queue in queues for period in {first // span, int(now) // span}]
    commands = [
        ("HGETALL", f"{store.keys(queue).outcomes}rates:{size}:{period}")
        for queue, period in places
    ]
    answers = without_errors(store.run.many(commands)) if commands else []
    for (queue, period), answer in zip(places, answers, strict=True):
        for name, text in pairs(answer):
            place, _, task = name.decode(errors="surrogateescape").partition(":")
            at = period * span + int(place) * size
            if first <= at <= now:
                yield Slot(queue, at, task, Tally.of(text))
