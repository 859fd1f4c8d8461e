"""Tasks that a cold shutdown cancels. Their messages are returned together, so in their order."""

from __future__ import annotations

import time
from collections.abc import Iterable
from multiprocessing.connection import wait
from typing import Any

from celery.concurrency.asynpool import AsynPool
from celery.utils.log import get_logger
from celery.worker.state import active_requests

logger = get_logger(__name__)

#: How long to wait for processes. Celery waits afterwards, but checks them only every half second.
PATIENCE_SECONDS = 0.5
#: How often a soft shutdown of greenlets looks whether their tasks have ended.
SOFT_TURN_SECONDS = 0.05


class CancelledProcesses:
    """Tasks in a pool of processes: each ends with its process."""

    def __init__(self) -> None:
        self._ending: list[tuple[Any, Any]] = []

    def add(self, request: Any, pool: Any) -> None:
        """Add a cancelled request. With the last one, wait for the processes of all."""
        processes = pool._pool._pool if isinstance(pool._pool, AsynPool) else ()
        process = next((each for each in processes if each.pid == request.worker_pid), None)
        if process is not None and not request.acknowledged:
            self._ending.append((request, process))
        if all(other.acknowledged for other in active_requests):
            ending, self._ending = self._ending, []
            _await_end(pool, [process for _, process in ending])
            give_back(request for request, process in ending if _has_ended(process))


def _has_ended(process: Any) -> bool:
    """Returns whether a process is gone, and all its messages were read."""
    return process.exitcode is not None and not process.outq._reader.poll(0)


def _await_end(pool: Any, processes: list[Any]) -> None:
    """Wait for processes that were sent TERM: each reports when it is ready, and is then killed."""
    end = time.monotonic() + PATIENCE_SECONDS
    while processes and (left_seconds := end - time.monotonic()) > 0:
        ends = {each.sentinel: each for each in processes}
        readers = {each.outq._reader: each for each in processes}
        for ready in wait([*ends, *readers], left_seconds):
            if ready in ends:
                ends[ready].join()
            else:
                hear(pool, readers[ready])
        processes = [each for each in processes if not _has_ended(each)]


def hear(pool: Any, process: Any) -> None:
    """Read one message of a process, as Celery does when it waits for its pool to end."""
    handler, processes = pool._pool._result_handler, pool._pool._fileno_to_outq
    handler._flush_outqueue(process.outqR_fd, processes.get, processes, handler.on_state_change)


class CancelledGreenlets:
    """Tasks in greenlets, which end some time after they were cancelled."""

    def __init__(self) -> None:
        self._running: set[Any] = set()
        self._ended: list[Any] = []

    def __contains__(self, request: Any) -> bool:
        return request in self._running

    def add(self, request: Any) -> None:
        self._running.add(request)

    def discard(self, request: Any) -> None:
        self._running.discard(request)

    def end(self, request: Any, was_killed: bool) -> None:
        """A greenlet has ended: by its cancellation, or just before, on its own."""
        if request in self._running:
            self._running.remove(request)
            if was_killed:
                self._ended.append(request)
            if not self._running:
                ended, self._ended = self._ended, []
                give_back(ended)


def cancel_method(consumer: Any) -> str:
    """The name of Celery's method that cancels the running tasks of a worker."""
    name = "cancel_active_requests"
    return name if hasattr(consumer, name) else "cancel_all_unacked_requests"  # before Celery 5.6


def cancel_greenlets_later(consumer: Any) -> None:
    """Let Celery cancel tasks in a greenlet of its own, after the time of a soft shutdown.

    The handler of a signal may run in the hub of the greenlets, which must not wait.
    """
    name = cancel_method(consumer)
    patience_seconds = consumer.app.conf.worker_soft_shutdown_timeout

    def cancel(seconds: float) -> None:
        end = time.monotonic() + seconds
        while active_requests and time.monotonic() < end:
            time.sleep(SOFT_TURN_SECONDS)
        getattr(type(consumer), name)(consumer)

    def cancel_later() -> None:
        nonlocal patience_seconds
        if patience_seconds > 0 and active_requests:
            logger.warning("Initiating Soft Shutdown, terminating in %s seconds", patience_seconds)
        consumer.pool.spawn_n(cancel, patience_seconds)
        patience_seconds = 0.0  # another signal cancels them at once

    vars(consumer)[name] = cancel_later


def give_back(requests: Iterable[Any]) -> None:
    """Return the messages of requests to the heads of their queues, in their order."""
    tags: dict[Any, list[int]] = {}
    for request in requests:
        channel = request.message.channel
        if hasattr(channel, "handed_out") and not (request.acknowledged or channel.closed):
            tags.setdefault(channel, []).append(request.message.delivery_tag)
    for channel in tags:
        channel.handed_out.give_back(tags[channel])
