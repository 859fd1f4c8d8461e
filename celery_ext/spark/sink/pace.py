"""Limits the speed of writers, by a rate that they share and by the broker's latency."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from math import inf
from statistics import median
from time import perf_counter
from typing import TypeVar

from kombu_delayed.store.calls.scripts import script
from kombu_delayed.store.keys import job_pace
from kombu_delayed.store.ledgers import Job
from kombu_delayed.store.store import Store

from ..options import WriteOptions

T = TypeVar("T")

#: The shortest and longest pause after a batch, and the factors by which it grows and shrinks.
LEAST_SECONDS, MOST_SECONDS, GROWS, SHRINKS = 0.005, 1.0, 2.0, 0.7

#: How long a writer works between two measurements, even if its batches are small.
LOOK_SECONDS = 0.05

#: Measurements of the network's jitter before a job writes, and how long they may take.
FIRST_LOOKS, FIRST_LOOKS_SECONDS = 21, 0.25


def round_trip_seconds(store: Store) -> float:
    """The round trip of the slowest server, as any other client sees it."""
    longest = 0.0
    for server in store.run.everywhere():
        server("PING")  # until then the server may be busy with this writer's own batch
        began = perf_counter()
        server("PING")
        longest = max(longest, perf_counter() - began)
    return longest


def jitter_seconds(store: Store, clock: Callable[[], float] = perf_counter) -> float:
    """The median round trip minus the shortest one, before a job writes."""
    ends, trips = clock() + FIRST_LOOKS_SECONDS, [round_trip_seconds(store)]
    while len(trips) < FIRST_LOOKS and clock() < ends:
        trips.append(round_trip_seconds(store))
    return median(trips) - min(trips)


class Pace:
    """Lets one task of Spark write no faster than its job and the broker allow."""

    def __init__(
        self,
        store: Store,
        options: WriteOptions,
        job: Job,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = perf_counter,
        on_written: Callable[[int], None] | None = None,
        jitter_seconds: float = 0.0,
    ) -> None:
        self._on_written = on_written
        self._store = store
        self._per_second = options.max_rows_per_second
        self._looks = options.latency_budget_ms > 0
        self._budget_seconds = options.latency_budget_ms / 1000 + jitter_seconds
        self._key = job_pace(job.ledger, store.keys("").prefix)
        self._sleep, self._clock = sleep, clock
        self._looked_at = -inf
        self._pause_seconds = 0.0
        #: The shortest round trip so far: the network's own, which no pause shortens.
        self._best_seconds = inf
        #: Rows that are sent together: at most those of one second, so that no writer waits long.
        self.batch = min(options.batch_size, self._per_second or options.batch_size)

    def over(self, rows: Iterable[T]) -> Iterator[T]:
        """Yield the rows, and pause after a batch if needed."""
        count = 0
        for row in rows:
            if count == self.batch:
                self.written(count)
                count = 0
            yield row
            count += 1
        if count:
            self.written(count)

    def written(self, count: int) -> None:
        """Wait as long as the limits require after this number of rows."""
        if self._on_written:
            self._on_written(count)
        seconds = self._back_off() if self._looks else 0.0
        if self._per_second:
            given = {"rows": count, "per_second": self._per_second, "now": self._store.now}
            wait_ms = script("pace")(self._store.run, pace=self._key, **given)
            seconds = max(seconds, wait_ms / 1000)
        if seconds:
            self._sleep(seconds)

    def _back_off(self) -> float:
        """A pause that grows while the broker answers too slowly, and shrinks when it does not."""
        if self._clock() - self._looked_at < LOOK_SECONDS:
            return 0.0
        trip_seconds = round_trip_seconds(self._store)
        self._best_seconds = min(self._best_seconds, trip_seconds)
        if trip_seconds - self._best_seconds > self._budget_seconds:
            longer = max(LEAST_SECONDS, self._pause_seconds * GROWS)
            self._pause_seconds = min(MOST_SECONDS, longer)
        else:
            self._pause_seconds *= SHRINKS
            if self._pause_seconds < LEAST_SECONDS:
                self._pause_seconds = 0.0
        self._looked_at = self._clock() + self._pause_seconds
        return self._pause_seconds
