"""Waits for a pool to end and acknowledges its tasks meanwhile, as the event loop has stopped.

The messages of each process of a pool are read until it ends.

Celery forgets a task that it has written to a process, but whose start the process has not
reported. The process still runs the task. Then the message of the task returns to the queue, and
the process waits 30 seconds for its result to be read. See docs/upstream/celery-warm-shutdown.md.
A cold shutdown does not cancel such a task, and would wait until it ends.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from threading import Thread
from typing import Any

from billiard.pool import CLOSE, RUN, TERMINATE, WorkersJoined
from celery.concurrency.asynpool import AsynPool
from celery.worker import state
from kombu.message import Message

from .cold_shutdown import cancel_method, give_back, hear

#: How long timers, time limits and acks that failed wait at most.
TURN_SECONDS = 0.1
#: How long an ack waits at most while a pool of threads ends.
ACK_SECONDS = 0.02


class Draining:
    """Replaces a pool's `flush` and `on_stop`."""

    def __init__(self, consumer: Any) -> None:
        self._consumer, self._task_pool = consumer, consumer.pool
        self._pool = consumer.pool._pool
        #: Processes that were asked to end.
        self._asked: set[Any] = set()

    @classmethod
    def install(cls, consumer: Any) -> Draining | None:
        """Let it flush the pool of a worker with an event loop. Safe to call twice.

        Returns None if the worker has no pool of processes with an event loop.
        """
        if consumer.hub is None or not isinstance(getattr(consumer.pool, "_pool", None), AsynPool):
            return None
        draining = cls(consumer)
        vars(consumer.pool)["flush"] = draining.flush
        return draining

    def flush(self) -> None:
        """Forget the tasks that no process was given, and return them at once."""
        if self._pool._state != CLOSE and not (self._pool._state == RUN and _is_cold()):
            self._pool.flush()
            return
        while self._hear(0):
            pass
        self._cancel_if_cold()
        self._give_back_unwritten()

    def stop(self) -> None:
        """Wait until all processes have ended, and read all their messages."""
        self._pool.close()
        while self._pool._pool and self._pool._state != TERMINATE:
            self._turn()
            self._cancel_if_cold()
        self._give_back_unwritten()
        if self._task_pool._pool is not None:  # else another signal has stopped it meanwhile
            self._pool.join()
            self._task_pool._pool = None

    def _cancel_if_cold(self) -> None:
        """Cancel tasks that the worker did not know to run when Celery cancelled the others."""
        if _is_cold():
            getattr(self._consumer, cancel_method(self._consumer))()

    def _turn(self) -> None:
        # The sentinel of an ended process may be closed, and another file may have its number.
        running = [each for each in self._pool._pool if each.exitcode is None]
        waking = [(each.sentinel, EVENT_READ, int) for each in running]
        speaking = [
            (each.inqW_fd, EVENT_WRITE, partial(self._speak, each))
            for each in running
            if each not in self._asked
        ]
        some_ended = len(running) < len(self._pool._pool)
        self._hear(0 if some_ended else TURN_SECONDS, *waking, *speaking)
        with suppress(WorkersJoined):
            self._pool._join_exited_workers(shutdown=True)
        self._pool.check_timeouts()
        self._consumer.hub.fire_timers()
        send_acks(self._consumer)

    def _hear(self, timeout_seconds: float, *others: tuple[int, int, Any]) -> bool:
        """Read a message of each process that has one; returns whether anything was ready."""
        with DefaultSelector() as selector:
            for fd, process in self._pool._fileno_to_outq.items():
                if not process.outq._reader.closed:  # a process that is gone may stay in there
                    selector.register(fd, EVENT_READ, partial(hear, self._task_pool, process))
            for other in others:
                selector.register(*other)
            ready = selector.select(timeout_seconds)
        for key, _ in ready:
            key.data()
        return bool(ready)

    def _speak(self, process: Any) -> None:
        """Write more of a task that was partly written to a process, or else ask it to end."""
        writers = (job._writer() for job in self._pool._cache.values() if job._write_to is process)
        writer = next((each for each in writers if each in self._pool._active_writers), None)
        with suppress(StopIteration, OSError):
            if writer is not None:
                next(writer)
            else:
                self._asked.add(process)
                process.inq.put(None)

    def _give_back_unwritten(self) -> None:
        jobs = list(self._pool.outbound_buffer)
        self._pool.outbound_buffer.clear()
        for job in jobs:
            job.discard()
        requests = (getattr(job._accept_callback, "__self__", None) for job in jobs)
        give_back(request for request in requests if request is not None)


def await_threads(consumer: Any) -> None:
    """Stop a pool of threads, and ack each task when it ends, not when the last one has ended."""
    stopping = Thread(target=type(consumer.pool).on_stop, args=(consumer.pool,), daemon=True)
    stopping.start()
    while stopping.is_alive():
        stopping.join(ACK_SECONDS)
        send_acks(consumer)


def send_acks(consumer: Any) -> None:
    """Do what the event loop would do for messages of tasks that have started or ended."""
    hub = consumer.hub
    for callback in hub._pop_ready():
        if is_of_message(getattr(callback, "fun", None)):
            try:
                callback()
            except Exception as error:  # the others must not be lost
                hub.on_callback_error(callback, error)
        else:
            hub.call_soon(callback)
    channel: Any = getattr(consumer.task_consumer, "channel", None)
    if hasattr(channel, "handed_out"):
        channel.flush()


def is_of_message(function: Any) -> bool:
    """Returns whether a function is a method of a message, such as its ack."""
    return isinstance(getattr(function, "__self__", None), Message)


def _is_cold() -> bool:
    return not (state.should_terminate is None or state.should_terminate is False)
