"""Who is told of what happens to messages in this process: a meter, and listeners."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from time import perf_counter
from typing import Any

from ...connection.native import get_logger

logger = get_logger(__name__)


class Meter:
    """Told in whichever thread something happens; this one does nothing with it.

    Its methods are short, and raise nothing. A queue may be one shard of a queue.
    """

    def scheduled(self, queue: str, count: int) -> None:
        """So many messages are in the backlog now that were not."""

    def consuming(self, queue: str) -> None:
        """A consumer of this process takes what comes to a queue from now on."""

    def delivered(self, queue: str, late_seconds: float | None, deliveries: int) -> None:
        """A message goes to its consumer, so long after it was due; None: it was never delayed.

        `deliveries` counts the earlier ones, which were in vain.
        """

    def reclaimed(self, queue: str, count: int) -> None:
        """So many messages of a consumer that has stopped answering are back."""

    def buried(self, queue: str, count: int) -> None:
        """So many messages have become dead letters."""

    def lease_lost(self) -> None:
        """A consumer of this process has lost its lease, and what it held."""

    def outcomes_dropped(self, count: int) -> None:
        """This number of task events was dropped."""

    def script_took(self, name: str, seconds: float) -> None:
        """A script was sent and its answer read, or an error."""


#: The one that is told; None: nobody counts.
current: Meter | None = None

#: Called with the store, the queue and the ids of dead letters that this process has made.
burial_listeners: list[Callable[[Any, str, list[str]], None]] = []


def timed(name: str, on_answer: Callable[[Any], None]) -> Callable[[Any], None]:
    """What takes the answer of a script that is sent now; the meter is told how long it took."""
    if (told := current) is None:
        return on_answer
    began = perf_counter()

    def answered(answer: Any) -> None:
        told.script_took(name, perf_counter() - began)
        on_answer(answer)

    return answered


def tell_of_burials(store: Any, queue: str, ids: list[str]) -> None:
    """Tell the meter and all listeners.

    Listeners soon, in a thread of their own: they may take their time, and must not hold up acks,
    nor the thread that renews the leases.
    """
    if not ids:
        return
    if (told := current) is not None:
        told.buried(queue, len(ids))
    if burial_listeners:
        try:
            _executor(os.getpid()).submit(_call, store, queue, ids)
        except RuntimeError:  # the interpreter is about to end
            _call(store, queue, ids)


@cache
def _executor(pid: int) -> ThreadPoolExecutor:
    # A fork has no threads of its parent's.
    return ThreadPoolExecutor(1, thread_name_prefix="kombu-delayed-burials")


def _call(store: Any, queue: str, ids: list[str]) -> None:
    for listener in tuple(burial_listeners):
        try:
            listener(store, queue, ids)
        except Exception:
            logger.exception("A listener has failed on dead letters of queue %r", queue)
