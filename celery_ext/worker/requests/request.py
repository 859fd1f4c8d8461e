"""A task in a worker, which starts only while the worker still has its message.

A worker that ends returns what it has not started, and one that was stopped for longer than its
lease has lost it. Celery removes such tasks from only some of its pools, or later.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from billiard.einfo import ExceptionInfo, ExceptionWithTraceback
from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry, TaskRevokedError, WorkerTerminate
from celery.platforms import EX_FAILURE
from celery.utils.log import get_logger
from celery.worker import state
from celery.worker.request import Request as CeleryRequest
from celery.worker.state import task_ready

from ...app import recorder
from ...app.recorder import ARGUMENTS_LENGTH, MESSAGE_LENGTH
from ...policies.steps import CANNOT_END
from ...policies.times.timeout import worker_limits
from ...tasks.failures import BURIED, RETRIED_IN, describe, text_of
from ..shutdown.cold_shutdown import CancelledProcesses
from .errors import is_out_of_reach, lost, raised
from .settling import not_stored, settle, settle_revoked
from .unique_hold import UniqueHold

logger = get_logger(__name__)

#: Celery's result of a greenlet that was killed: no failure, no result, no run time.
KILLED = (False, None, None)


def as_result(result: Any) -> tuple[Any, ...]:
    """A result as Celery expects it of pools: whether a task failed, its value, its run time.

    Threads give the error alone if a task ends like a process, by SystemExit.
    """
    return (True, result, None) if isinstance(result, ExceptionInfo) else result


def _to_the_end(on_success: Any) -> Any:
    @wraps(on_success)
    def on_success_to_the_end(self: Any, result: Any, *args: Any, **options: Any) -> None:
        result = as_result(result)
        try:
            self.note_overrun(result[2])
            on_success(self, result, *args, **options)
            if self.run is not None and not result[0] and result[2] is not None:
                self.ended("+", result[2])
            if self.hold is not None and not result[0]:
                was_acked = self._begins and not self.task.acks_late
                if was_acked or tuple(result) != KILLED:  # else its message returns
                    self.hold.ended()
        finally:
            self.end()

    return on_success_to_the_end


def _once_it_may_begin(execute: Any) -> Any:
    @wraps(execute)
    def execute_once_it_may_begin(self: Any, pool: Any, **options: Any) -> Any:
        if not (self._waits_in_pool or self._may_begin()):
            raise TaskRevokedError(self.id)
        self._can_be_ended = type(pool).__module__ not in CANNOT_END
        return execute(self, pool, **options)

    return execute_once_it_may_begin


class Request(CeleryRequest):
    """Celery's own, for a pool of processes: it has started once it is given to the pool."""

    #: Whether it begins later than the worker gives it to its pool.
    _waits_in_pool = False
    #: Whether its pool enforces its hard limit.
    _can_be_ended = True
    _begins: bool | None = None
    _processes = CancelledProcesses()
    #: Releases its slots, if it has any: when it ends, or else when nothing refers to it.
    _end: Callable[[], Any] | None = None
    #: The run to record its outcome for; None if that is not recorded, or already was.
    run: recorder.Run | None = None
    #: Its unique key, if it keeps one until its end.
    hold: UniqueHold | None = None
    #: Whether it is retried after its hard limit; None if its strategy was not asked.
    _goes_on: bool | None = None
    #: Whether it is a dead letter, and so must not become another one.
    _is_buried = False
    #: Why its message is rejected, if it is.
    _why = ""
    #: Whether its message has gone back to its queue.
    _goes_back = False
    #: Whether its process died after it had stored the result.
    _has_succeeded = False
    #: Celery's retry of it after its process died.
    _retried: Retry | None = None

    def __init__(self, message: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(message, *args, **kwargs)
        shard = shard_of(message)
        self.hold = UniqueHold.of(self.app, message, shard)
        if (active := recorder.current) is not None:
            self.run = active.received(self, shard)
        handed_out = getattr(message.channel, "handed_out", None)
        on_return = [partial(active.returned, self.run)] if active and self.run else []
        if handed_out is not None and handed_out.is_for_good(message.delivery_tag):
            self._begins = True
        if handed_out is not None and handed_out.waits(message.delivery_tag, *on_return):
            end = weakref.finalize(self, handed_out.has_ended, message.delivery_tag)
            end.atexit = False
            self._end = end

    def __init_subclass__(cls, **options: Any) -> None:
        """Celery makes a class for each task, with such methods of its own."""
        super().__init_subclass__(**options)
        cls.on_success = _to_the_end(cls.on_success)
        cls.execute_using_pool = _once_it_may_begin(cls.execute_using_pool)

    def end(self) -> None:
        """Release its slots, because nothing works on it any more. Safe to call twice."""
        if self._end is not None:
            self._end()

    def note_overrun(self, seconds: float | None) -> None:
        """Log and record that it took longer than its hard limit, which not all pools enforce."""
        limit = self._hard_limit
        if limit and seconds is not None and seconds > limit:
            if self.run is not None:
                self.run.limit_seconds = limit
            logger.warning(
                "Task %s[%s] ran for %.1f s, and its time limit is %g s: this pool cannot end it",
                self.name,
                self.id,
                seconds,
                limit,
            )

    @property
    def _hard_limit(self) -> float | None:
        """Its own hard limit, or that of its task, or of a worker whose pool enforces it."""
        return self.time_limits[0] or self.task.time_limit or worker_limits.get("time_limit")

    def ended(self, state: str, rest: Any) -> None:
        """Record how it has ended. Celery reports some ends twice: the first one counts."""
        run, self.run = self.run, None
        if run is not None and (active := recorder.current) is not None:
            active.ended(run, state, rest)

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        """A pool has started it."""
        if self.hold is not None and not self.task.acks_late:
            self.hold.begins(self._hard_limit if self._can_be_ended else None)
        super().on_accepted(pid, time_accepted)
        if self.run is not None and (active := recorder.current) is not None:
            active.started(self.run, pid, self.task.acks_late)

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """It has exceeded a time limit. With the hard one it has ended, and may be retried."""
        error = TimeLimitExceeded(timeout)
        try:
            if soft or not self._goes_on_after(error):
                try:
                    super().on_timeout(soft, timeout)
                except Exception as failed:
                    not_stored(self, failed)
                if not (soft or self._already_cancelled):
                    settle(self, error)
                if self.hold is not None and not soft and not self._goes_back:
                    self.hold.ended()
        finally:
            if not soft:
                self._has_failed(error, None)
                self.end()

    def reject(self, requeue: bool = False) -> None:
        """Put its message back, or bury it unless it is already buried."""
        if self._is_buried:
            self.acknowledge()
        else:
            self._goes_back = self._goes_back or (requeue and not self.acknowledged)
            if self._why and not requeue and hasattr(self.message.channel, "handed_out"):
                self.message.channel.qos.because(self.message.delivery_tag, self._why)
            super().reject(requeue)

    def _announce_revoked(self, reason: str, *args: Any) -> None:
        try:
            super()._announce_revoked(reason, *args)
        except Exception as error:
            settle_revoked(self, error, *args)
        self.ended("x", {"why": reason})
        if self.hold is not None:
            self.hold.ended()

    def _has_failed(self, error: BaseException, traceback: Any) -> None:
        run, self.run = self.run, None
        if run is None or (active := recorder.current) is None:
            return
        most = self.task.max_retries
        facts: dict[str, Any] = {"run_ms": self._run_ms()}
        if isinstance(error, (Reject, Ignore)):
            why = "ignored" if isinstance(error, Ignore) else "rejected"
            facts |= {"why": why, "message": text_of(error)[:MESSAGE_LENGTH]}
            active.ended(run, "x", facts)
            return
        if active.options.arguments:
            for name, text in (("args", self.argsrepr), ("kwargs", self.kwargsrepr)):
                facts[name] = str(text or "")[:ARGUMENTS_LENGTH]
        retries = self.request_dict.get("retries") or 0
        # A task that is not retried although it could be has one attempt, not one of many.
        if type(most) is int and (isinstance(error, Retry) or retries >= most):
            facts["attempts"] = most + 1
        note = active.retrying if isinstance(error, Retry) else active.failed
        note(run, error, traceback, **facts)

    def _run_ms(self) -> int | None:
        if self.time_start is None:
            return None
        return max(int((time.time() - self.time_start) * 1000), 0)

    def cancel(self, pool: Any, *args: Any, **kwargs: Any) -> None:
        """End it in a cold shutdown: its message returns as soon as nothing works on it.

        Raises WorkerTerminate, through the task, in a pool that runs in this very thread.
        """
        try:
            super().cancel(pool, *args, **kwargs)
        except NotImplementedError:
            if not self.task.acks_late or self.acknowledged or self.message.channel.closed:
                raise
            # Celery's error would be taken for the task's own: it would fail, and be acked.
            raise WorkerTerminate(EX_FAILURE) from None
        except Exception as error:
            # Unless it is marked as cancelled, the end of its process is taken for a revoke.
            self._already_cancelled = True
            logger.warning(
                "Task %s[%s] is cancelled, but its result is not stored: %s",
                self.name,
                self.id,
                error,
            )
        self._processes.add(self, pool)

    def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> Any:
        """It has failed. The reason of a rejection is kept for its dead letter.

        Celery rejects a task whose retry could not be sent. Here it returns to its queue, because
        an unreachable broker is not the fault of the task.
        """
        error = exc_info.exception
        if isinstance(error, ExceptionWithTraceback):
            error = error.exc
        self._why = describe(error)
        if isinstance(error, Reject) and hasattr(self.message.channel, "handed_out"):
            if not self.acknowledged and is_out_of_reach(error.reason):
                error.requeue = True
            self._why = text_of(error.reason) if error.reason else ""
        self._is_buried = self._is_buried or getattr(exc_info, BURIED, False)
        if self._was_lost(error) and self._is_retried(lost(error)):
            return None
        if isinstance(error, TimeLimitExceeded) and self._goes_on_after(error):
            return None
        try:
            return super().on_failure(exc_info, *args, **kwargs)
        except Exception as failed:
            if not self._already_cancelled:
                settle(self, error, isinstance(error, WorkerLostError) and self._returns_if_lost)
            if not isinstance(error, Reject):
                raise
            not_stored(self, failed)
        finally:
            error = self._retried or error
            if not (self._already_cancelled or isinstance(error, Terminated)):
                self._has_failed(error, exc_info.traceback)
                if self.hold is not None and not self._goes_back:
                    if isinstance(error, Retry):
                        home = getattr(exc_info, RETRIED_IN, None)
                        self.hold.goes_on(error.when, home, self.task.acks_late)
                    self.hold.ended(error, self.task.acks_late)
            elif self.hold is not None and not self.task.acks_late:
                self.hold.ended(error, acks_late=False)
            self.end()

    def _goes_on_after(self, error: TimeLimitExceeded) -> bool:
        """Returns whether it is retried after its hard limit, which processes report twice."""
        if self._goes_on is None:
            self._goes_on = self._is_retried(error)
        return self._goes_on

    def _is_retried(self, error: Exception) -> bool:
        """Returns whether its retry strategy, which it could not ask itself, retries it."""
        retrying = getattr(self.task.run, "retrying", None)
        if retrying is None or state.should_terminate:
            return False
        context = Context(vars(self._context), called_directly=False)
        try:
            retried = retrying.ended(context, error, self.store_errors)
        except Reject as rejected:
            if not self.task.acks_late:
                logger.error("Task %s[%s] is not retried: %s", self.name, self.id, rejected.reason)
                return False
            retried = raised(rejected)
        self._is_buried = bool(vars(context).get("delayed_given_up"))
        if retried is not None:
            self.on_failure(retried)
        return retried is not None

    def _was_lost(self, error: BaseException) -> bool:
        """Returns whether its process has ended, and nothing else runs it or will run it."""
        if isinstance(error, (SystemExit, KeyboardInterrupt)):  # newer billiard reports this first
            is_lost = not (self._already_cancelled or self._already_revoked)
        else:
            is_lost = isinstance(error, WorkerLostError)
        retries = getattr(self.task, "retry_on_worker_lost", False)
        return is_lost and not (self._returns_if_lost or retries or self._success_was_stored())

    @property
    def _returns_if_lost(self) -> bool:
        """Whether Celery puts its message back if its process has ended."""
        task = self.task
        return bool(task.acks_late and task.reject_on_worker_lost) and not self._is_buried

    def _success_was_stored(self) -> Any:
        """Celery's own look into the result backend, which versions before 5.7 do not take."""
        found = getattr(super(), "_success_was_stored", bool)()
        if found:
            self._has_succeeded = True
            self.ended("+", (self._run_ms() or 0) / 1000)
        return found

    def _retry_worker_lost(self, error: Exception, *args: Any) -> bool:
        """Celery's own, from 5.7 on: retry it after its process has died."""
        try:
            is_retried: bool = super()._retry_worker_lost(error, *args)
        except Exception as failed:  # after the retry was sent
            not_stored(self, failed)
            is_retried = True
            if self.task.acks_late:
                self.acknowledge()
        if is_retried:
            self._retried = Retry(exc=error, when=self.task.default_retry_delay)
        return is_retried

    def _may_begin(self) -> bool:
        if self._begins is None:
            handed_out: Any = getattr(self.message.channel, "handed_out", None)
            self._begins = handed_out is None or bool(handed_out.begins(self.message.delivery_tag))
            if not self._begins:
                logger.info("Task %s[%s] is not run: it is in its queue again", self.name, self.id)
                task_ready(self)
        return self._begins


def shard_of(message: Any) -> str:
    """The shard of a message; for a message of another transport, its routing key."""
    qos = getattr(message.channel, "qos", None)
    queue_of_tag = getattr(qos, "queue_of", lambda tag: None)
    found = queue_of_tag(message.delivery_tag)
    return str(found or (message.delivery_info or {}).get("routing_key") or "")
