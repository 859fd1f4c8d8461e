"""Reports what happens to messages in this process, to a meter and to listeners."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from time import perf_counter
from typing import Any

from ...connection.native import get_logger, hand_over

logger = get_logger(__name__)


class Meter:
    """Called in the thread where something happens. The methods of this base class do nothing.

    Under gevent and eventlet this may be a native thread beside the greenlets, which may take no
    patched lock: see `native.hand_over`.

    Methods must be short and raise nothing. A queue may be one shard of a queue.
    """

    def scheduled(self, queue: str, count: int) -> None:
        """This number of messages was added to the backlog."""

    def consuming(self, queue: str) -> None:
        """A consumer of this process consumes a queue from now on."""

    def delivered(self, queue: str, late_seconds: float | None, deliveries: int) -> None:
        """A message goes to its consumer, this late after its due time; None: never delayed.

        `deliveries` counts the earlier deliveries, which failed.
        """

    def reclaimed(self, queue: str, count: int) -> None:
        """This number of messages was reclaimed from a consumer that stopped renewing its lease."""

    def buried(self, queue: str, count: int) -> None:
        """This number of messages became dead letters."""

    def lease_lost(self) -> None:
        """A consumer of this process has lost its lease and the messages that it held."""

    def outcomes_dropped(self, count: int) -> None:
        """This number of task events was dropped."""

    def script_took(self, name: str, seconds: float) -> None:
        """A script was sent, and its answer or error read, in `seconds`."""


#: The meter in use; None if nothing is measured.
current: Meter | None = None

#: Called with the store, the queue and the ids of dead letters that this process has made.
burial_listeners: list[Callable[[Any, str, list[str]], None]] = []


def timed(name: str, on_answer: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap `on_answer` for a script that is sent now, to report to the meter how long it took."""
    if (meter := current) is None:
        return on_answer
    began = perf_counter()

    def answered(answer: Any) -> None:
        meter.script_took(name, perf_counter() - began)
        on_answer(answer)

    return answered


def count_buried(store: Any, queue: str, ids: Sequence[bytes]) -> None:
    """Notify the meter of messages that a script has buried, and soon all listeners.

    Listeners run in a thread of their own, because they may be slow and must not delay acks or the
    thread that renews the leases.
    """
    if not ids:
        return
    if (meter := current) is not None:
        meter.buried(queue, len(ids))
    if burial_listeners:
        names = [id.decode(errors="surrogateescape") for id in ids]
        given = store.for_others or store, queue, names
        if not hand_over(_submit, *given):
            _submit(*given)


def _submit(store: Any, queue: str, ids: list[str]) -> None:
    try:
        _executor(os.getpid()).submit(_call, store, queue, ids)
    except RuntimeError:  # the interpreter is shutting down
        _call(store, queue, ids)


@cache
def _executor(pid: int) -> ThreadPoolExecutor:
    # A fork has none of its parent's threads, so each process has its own executor.
    return ThreadPoolExecutor(1, thread_name_prefix="kombu-delayed-burials")


def _call(store: Any, queue: str, ids: list[str]) -> None:
    for listener in tuple(burial_listeners):
        try:
            listener(store, queue, ids)
        except Exception:
            logger.exception("A listener has failed on dead letters of queue %r", queue)
