"""Counts the tasks of a worker, in its main process with every pool."""

from __future__ import annotations

import time
from typing import Any

from billiard.einfo import ExceptionWithTraceback
from billiard.exceptions import TimeLimitExceeded
from celery.exceptions import Ignore, Reject, Retry

from kombu_delayed.store.calls.shards import queue_of

from ...metrics.measuring import measure
from .pooled_request import PooledRequest
from .request import KILLED, Request, as_result, shard_of

_STATES = (
    (Retry, "retry"),
    (Reject, "rejected"),
    (Ignore, "ignored"),
    (TimeLimitExceeded, "timeout"),
)


def _counted(on_success: Any) -> Any:
    def counted(self: Any, result: Any, **options: Any) -> Any:
        result = as_result(result)
        found = on_success(self, result, **options)
        if not result[0] and tuple(result) != KILLED:
            self._ends("success", result[2])
        return found

    return counted


class MeasuredRequest(Request):
    """A request that reports when it starts and how it ends."""

    _is_counted = False

    def __init__(self, message: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(message, *args, **kwargs)
        self._meter = measure()
        self._queue = queue_of(shard_of(message))

    def __init_subclass__(cls, **options: Any) -> None:
        """Celery makes a class for each task, with an `on_success` of its own."""
        super().__init_subclass__(**options)
        if "on_success" in vars(cls):
            cls.on_success = _counted(cls.on_success)

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        super().on_accepted(pid, time_accepted)
        due_ms = getattr(self.message.headers, "due_ms", None)
        since_ms = max(due_ms or 0, getattr(self.message.headers, "resumed_ms", 0))
        late_seconds = None if due_ms is None else self.time_start - since_ms / 1000
        self._meter.started(self._queue, self.name, late_seconds)

    def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> Any:
        """It has failed, will be retried, or has rejected or ignored its message."""
        try:
            return super().on_failure(exc_info, *args, **kwargs)
        finally:
            error = exc_info.exception
            if isinstance(error, ExceptionWithTraceback):
                error = error.exc
            error = self._retried or error
            state = next((state for kind, state in _STATES if isinstance(error, kind)), "failure")
            self._ends("success" if self._has_succeeded else state)

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """It has exceeded its time limit. `soft`: the limit of which the task itself is told."""
        super().on_timeout(soft, timeout)
        if not soft:
            self._ends("timeout")

    def _announce_revoked(self, reason: str, *args: Any) -> None:
        super()._announce_revoked(reason, *args)
        self._ends("expired" if reason == "expired" else "revoked")

    def _ends(self, state: str, seconds: float | None = None) -> None:
        # Celery reports some ends twice: a time limit is a failure as well.
        if not self._is_counted and not self._already_cancelled:
            self._is_counted = True
            self._meter.finished(self._queue, self.name, state)
            if seconds is None and self.time_start is not None:
                seconds = time.time() - self.time_start
            if seconds is not None:
                self._meter.ran(self._queue, self.name, seconds)


class MeasuredPooledRequest(MeasuredRequest, PooledRequest):
    """For pools other than those of processes."""
