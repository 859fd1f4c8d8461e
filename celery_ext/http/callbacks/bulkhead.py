"""Bulkheads between receivers: a host has limited places, so that a slow one delays no other."""

from __future__ import annotations

import os
import random
import time
from contextlib import suppress
from dataclasses import dataclass

from celery import Task

from celery_ext.app.broker import own_broker
from celery_ext.errors import BROKER_FAILS
from kombu_delayed.store.calls.scripts import script
from kombu_delayed.store.keys import http_host, http_host_timeouts, http_host_worker

from ..options import HttpOptions

#: After this many timeouts in a row, a host gets one callback at a time, until it answers or this
#: many seconds have passed since the last timeout.
TIMEOUTS, REMEMBERED_SECONDS = 3, 120

#: How long other jobs for such a host wait, on average.
TIMES_OUT_SECONDS = 30.0

#: How long a place is kept beyond the timeout of its callback, such as for DNS.
SPARE_SECONDS = 30

#: How long a job waits for a place within its slot, as long as no callback to the host has lasted
#: longer than that; and how often it looks again.
QUICK_SECONDS, LOOK_AGAIN_SECONDS = 0.25, 0.02

TAKEN, TIMES_OUT = 1, -1


@dataclass(frozen=True)
class Busy:
    """A host without a free place, and how long its oldest callback has lasted."""

    times_out: bool
    seconds: float


def host_limit(task: Task, share: float) -> int:
    """How many slots of this worker the callbacks to one host may occupy."""
    slots = getattr(task, "slots", 0) or task.app.conf.worker_concurrency or os.cpu_count() or 1
    return max(int(slots * share), 1)


def longest_seconds(settings: HttpOptions) -> float:
    """The longest timeout of any callback."""
    return max(settings.callback_seconds, settings.callback_longest_seconds)


def pause_seconds(busy: Busy) -> float:
    """How long a job without a place waits: longer if the host has not answered for longer."""
    pause = TIMES_OUT_SECONDS if busy.times_out else min(max(busy.seconds, 2.0), 10.0)
    return pause * random.uniform(0.5, 1.5)


class Place:
    """A place at a host for the job that a worker runs."""

    def __init__(self, task: Task, settings: HttpOptions, host: str) -> None:
        self._store = own_broker(task.app).store
        prefix, worker = self._store.keys("").prefix, task.request.hostname or ""
        self._keys = {
            "places": http_host(host, prefix),
            "own": http_host_worker(host, worker, prefix),
            "timeouts": http_host_timeouts(host, prefix),
        }
        self._holder = task.request.id
        self._given = {
            "holder": self._holder,
            "limit": settings.callback_per_host,
            "own_limit": host_limit(task, settings.callback_share),
            "tolerated": TIMEOUTS,
            # The same for all jobs, so that the scores show when callbacks began.
            "kept_ms": int((longest_seconds(settings) + SPARE_SECONDS) * 1000),
        }

    def take(self) -> Busy | None:
        """Take a place. Returns None, or why there is none."""
        until = time.monotonic() + QUICK_SECONDS
        while (busy := self._try()) and not busy.times_out and busy.seconds <= QUICK_SECONDS:
            if time.monotonic() >= until:
                break
            time.sleep(LOOK_AGAIN_SECONDS)
        return busy

    def _try(self) -> Busy | None:
        given = {**self._keys, **self._given, "now": self._store.now}
        outcome, oldest_ms = script("place")(self._store.run, **given)
        return None if outcome == TAKEN else Busy(outcome == TIMES_OUT, oldest_ms / 1000)

    def vacate(self, timed_out: bool) -> None:
        with suppress(*BROKER_FAILS):  # the place expires, and the callback was made
            script("vacate")(
                self._store.run,
                **self._keys,
                holder=self._holder,
                timed_out=int(timed_out),
                kept_ms=REMEMBERED_SECONDS * 1000,
            )
