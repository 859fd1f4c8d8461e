"""Waits until no task of a paused queue runs any more."""

from __future__ import annotations

import time

from ...app.outcome_options import OutcomeOptions
from ...app.queues import Queues
from ...errors import StillRunning
from ..counts import ConsumerInfo
from ..outcomes import recorded

#: How often to look.
LOOK_SECONDS = 0.25

#: How long it takes at most to write a record that is due.
WRITING_SECONDS = 1.0


def wait_until_drained(queues: Queues, queue: str, seconds: float) -> None:
    """Wait until workers hold no message of a queue, and none of its tasks is recorded as running.

    A task that is acknowledged before it runs is recorded a moment later, so the queue must be
    quiet for that long. Raises StillRunning if there are tasks left after these seconds.
    """
    options = OutcomeOptions.of(queues.app) or OutcomeOptions()
    quiet_seconds = options.interval_seconds + WRITING_SECONDS
    began = busy_at = time.monotonic()
    while time.monotonic() - busy_at < quiet_seconds:
        if left := _left(queues, queue):
            busy_at = time.monotonic()
            if busy_at - began >= seconds:
                raise StillRunning(queue, left)
        time.sleep(LOOK_SECONDS)


def _left(queues: Queues, queue: str) -> int:
    """How many tasks live workers hold or, if they were acknowledged before, run."""
    consumers = ConsumerInfo.all_of(queues.store, queues.store.shards.all(queue))
    held = sum(each.unacked for each in consumers if each.lease_seconds > 0)
    return max(held, sum(1 for _ in recorded(queues, "running", queue)))
