"""Makes the tasks of a worker follow their retry strategies, in whichever way they fail."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from socket import gethostname
from typing import Any

from billiard.einfo import ExceptionInfo
from celery.app.task import Context, Task
from celery.app.trace import TraceInfo
from celery.exceptions import Ignore, MaxRetriesExceededError, Reject
from celery.exceptions import Retry as Retried
from celery.states import RETRY
from celery.utils.log import get_logger

from celery_ext.app.broker import own_broker
from celery_ext.app.capture import Capture
from celery_ext.app.unique_outcomes import hearing
from celery_ext.errors import BROKER_FAILS
from celery_ext.tasks import failures
from celery_ext.tasks.body import read_body
from celery_ext.tasks.failures import Failure, describe
from celery_ext.tasks.results import NotRun, context_of, store_failure
from celery_ext.tasks.times import from_ms
from kombu_delayed.consumer.policy.decisions import Decision, Delay, Drop
from kombu_delayed.errors import OptionError
from kombu_delayed.message import clock
from kombu_delayed.message.envelope import UNTIL_HEADER, escaped, to_json
from kombu_delayed.message.wait import Wait

from ..apps import policies_of
from ..message import Message
from ..policy import Policy
from .strategies import (
    FIRST_HEADER,
    GIVE_UP_HEADER,
    OWN_LIMITS_HEADER,
    QUEUE_HEADER,
    STRATEGY_HEADER,
    Attempt,
    GiveUp,
    RanOut,
    Retry,
    RetryStrategy,
)

logger = get_logger(__name__)

#: More than Celery ever counts: the strategy decides when to stop.
ENDLESS = sys.maxsize

#: How long to wait before sending a retry that cannot be sent now.
AGAIN_MS = 10_000

#: Headers with the history of a task, which an attempt hands on to the next one.
PAST_HEADERS = {failures.HEADER, FIRST_HEADER, GIVE_UP_HEADER}

#: Headers that a task which starts from scratch does not have.
BEGUN_HEADERS = {*PAST_HEADERS, OWN_LIMITS_HEADER, QUEUE_HEADER, STRATEGY_HEADER, "redelivered"}

#: Headers that a dead letter does not have: a channel sends it at once, and a replay does not claim
#: its key again.
UNIQUE_HEADERS = ("delayed_unique", "delayed_conflict", UNTIL_HEADER)

#: Returns the strategy that applies, given a queue, a task's policies and a message's headers.
StrategyOf = Callable[[str, tuple[Policy, ...], Mapping[str, Any]], RetryStrategy | None]


def follow(task: Task, strategy_of: StrategyOf) -> None:
    """Make a task follow its own strategy, or that of the queue it came from. Idempotent."""
    if not hasattr(task.run, "retrying"):
        task.run = _Retrying(task, strategy_of).run
    task.run.retrying.strategy_of = strategy_of


class _Retrying:
    def __init__(self, task: Task, strategy_of: StrategyOf) -> None:
        self._task = task
        self.strategy_of = strategy_of
        self._retry, self._on_failure, self._on_retry = task.retry, task.on_failure, task.on_retry
        task.retry, task.on_failure, task.on_retry = self.retry, self.on_failure, self.on_retry
        self.run = self._wrapped(task.run)

    def _wrapped(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(inner)
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return inner(*args, **kwargs)
            except (Ignore, Reject, Retried, *getattr(self._task, "dont_autoretry_for", ())):
                raise
            except Exception as error:
                if self._strategy() is None or "delayed_given_up" in vars(self._task.request):
                    raise
                raise self.retry(exc=error) from error

        run.retrying = self  # type: ignore[attr-defined]
        return run

    def _strategy(self) -> RetryStrategy | None:
        """Return the strategy that applies, or None if there is none or Celery runs it directly."""
        request = self._task.request
        if request.called_directly or request.is_eager:
            return None
        headers = request.headers or {}
        of_task = policies_of(self._task)
        return self.strategy_of(headers.get(QUEUE_HEADER, ""), of_task, headers)

    def retry(
        self,
        args: Any = None,
        kwargs: Any = None,
        exc: Exception | None = None,
        throw: bool = True,
        eta: Any = None,
        countdown: float | None = None,
        max_retries: int | None = None,
        **options: Any,
    ) -> Any:
        """Like `Task.retry`. A given time or maximum takes precedence over the strategy's."""
        strategy, request = self._strategy(), self._task.request
        options = {**_own_limits(request), **options}
        given = {"eta": eta, "countdown": countdown, "max_retries": max_retries}
        if strategy is None:
            return self._heard(args, kwargs, exc, throw, **given, **options)
        error = exc or sys.exc_info()[1] or MaxRetriesExceededError(f"{self._task.name} has failed")
        attempt, message = request.retries + 1, self._message()
        history = failures.before(request.headers)
        history.append(Failure.of(error, attempt, message.now_ms, str(request.hostname)))
        answer = _ask(strategy, message, error, attempt, max_retries)
        if isinstance(answer, GiveUp):
            request.delayed_given_up = bury(self._task, answer.reason, history)
            raise error
        changes = {"args": args, "kwargs": kwargs, **options, **_changes(answer, eta, countdown)}
        history_headers = {
            failures.HEADER: failures.write(history),
            FIRST_HEADER: message.first_failure_ms,
        }
        try:
            return self._send(changes, history_headers, exc=exc, throw=throw)
        except Retried:
            raise
        except Exception as failure:
            cause = failure.reason if isinstance(failure, Reject) else failure
            if not answer.changes or _is_of_broker(cause):
                raise
            request.delayed_given_up = bury(self._task, _broken(cause), history)
            raise error from cause

    def _send(self, changes: dict[str, Any], headers: dict[str, Any], **given: Any) -> Any:
        """Call `Task.retry` with these options and headers."""
        before = self._task.request.headers or {}
        merged = {**before, **(changes.get("headers") or {}), **headers}
        for name in (OWN_LIMITS_HEADER, STRATEGY_HEADER):  # it may have kilobytes of pauses
            merged.pop(name, None)
        try:
            return self._heard(max_retries=ENDLESS, **given, **{**changes, "headers": merged})
        finally:
            vars(self._task).pop("override_max_retries", None)

    def _heard(self, *args: Any, **options: Any) -> Any:
        """Call `Task.retry`, and note where the retry holds the unique key of its task, if any."""
        request = self._task.request
        if options.get("headers") is not None:
            options["headers"] = {**options["headers"], **_kept_key(request)}
        with hearing() as sent:
            try:
                return self._retry(*args, **options)
            finally:
                id = escaped(str(request.id))
                request.delayed_retried_in = next((to.queue for to in sent if to.id == id), None)

    def on_failure(
        self, exc: Exception, task_id: str, args: Any, kwargs: Any, einfo: ExceptionInfo
    ) -> None:
        """Like `Task.on_failure`, after noting whether the task is already buried.

        The process that received the task reads the note. It is not on the error: errors that
        pickle in their own way lose such an attribute, and Celery replaces those that cannot be
        pickled.
        """
        setattr(einfo, failures.BURIED, vars(self._task.request).get("delayed_given_up", False))
        self._on_failure(exc, task_id, args, kwargs, einfo)

    def on_retry(
        self, exc: Exception, task_id: str, args: Any, kwargs: Any, einfo: ExceptionInfo | None
    ) -> None:
        """Like `Task.on_retry`, after telling the process that received the task of its key."""
        if einfo is not None:  # else Celery cancels it in a cold shutdown
            setattr(einfo, failures.RETRIED_IN, vars(self._task.request).get("delayed_retried_in"))
        self._on_retry(exc, task_id, args, kwargs, einfo)

    def ended(
        self, request: Context, error: Exception, store_errors: bool = True
    ) -> ExceptionInfo | None:
        """Retry a task that could not do so itself, in the process that has received it.

        Returns None if there is no strategy or it has given up. Otherwise the task has been sent
        again, and this is what Celery makes of such an attempt. Raises Reject if sending failed.
        """
        self._task.request_stack.push(request)
        try:
            if self._strategy() is None:
                return None
            try:
                raise self.retry(exc=error, throw=False)
            except Retried as retried:
                info = TraceInfo(RETRY, retried)
                return info.handle_retry(self._task, request, store_errors=store_errors)
            except type(error) as raised:
                if raised is not error:
                    raise
                return None
        finally:
            self._task.request_stack.pop()

    def bury(self, request: Context, reason: str) -> bool:
        """Make a dead letter of an attempt that did not start. A replay starts from scratch."""
        self._task.request_stack.push(request)
        try:
            return bury(self._task, reason, failures.before(request.headers))
        finally:
            self._task.request_stack.pop()

    def _message(self) -> Attempt:
        request = self._task.request
        headers = request.headers or {}
        now_ms, first_ms = clock.now_ms(), headers.get(FIRST_HEADER)
        return Attempt(
            str(request.id),
            self._task.name,
            str(headers.get(QUEUE_HEADER, "")),
            request.args or (),
            request.kwargs or {},
            headers,
            now_ms,
            first_ms if type(first_ms) is int else now_ms,
        )


def bury(task: Task, reason: str, history: Sequence[Failure]) -> bool:
    """Make a dead letter of the running task. A replay starts from scratch.

    Returns whether it has become one.

    The task may be acked or not. If it is not, and this process dies before it is, it is delivered
    again although it is dead.
    """
    request = task.request
    headers = {
        name: value for name, value in (request.headers or {}).items() if name not in BEGUN_HEADERS
    } | dict.fromkeys(UNIQUE_HEADERS)  # None, as the task's own class may add them
    broker = own_broker(task.app)
    try:
        again = {**_own_limits(request), "retries": 0, "headers": headers, "eta": None}
        signature = task.signature_from_request(request, **again)
        channel = broker.connection.default_channel
        store = broker.store
        for verb, given in Capture(task.app, channel).of(signature.apply_async):
            if verb in ("put", "schedule"):
                queue, entry, _ = given
                home = store.shards.home(queue, entry.id)
                payload = json.loads(entry.message)
                for name in UNIQUE_HEADERS:
                    payload["headers"].pop(name, None)
                text = Wait(clock.now_ms(), reason).put_into(to_json(payload))
                record = entry.record[0] + text
                consumer = f"{request.hostname}:{os.getpid()}:"
                letter = 0, entry.id, reason, record.encode()
                store.bury(home, consumer, [letter], failures.write(history))
                return True
        logger.error("Task %s[%s] has failed and cannot be buried", task.name, request.id)
    except Exception:  # the task's own error is raised after this
        logger.exception("Task %s[%s] has failed and cannot be buried", task.name, request.id)
    return False


def _own_limits(request: Context) -> dict[str, Any]:
    """Return the limits that a task was sent with if its `Timeout` has set others, and headers.

    The next attempt may be in a queue without one.
    """
    headers = dict(request.headers or {})
    own = headers.pop(OWN_LIMITS_HEADER, None)
    if not (isinstance(own, (list, tuple)) and len(own) == 2):
        return {}
    return {"time_limit": own[0], "soft_time_limit": own[1], "headers": headers}


def _kept_key(request: Context) -> dict[str, Any]:
    """Return the headers of a unique key that a task keeps until its end: its retries have it."""
    headers = request.headers or {}
    is_kept = headers.get(UNTIL_HEADER) is not None
    return {name: headers[name] for name in UNIQUE_HEADERS if name in headers} if is_kept else {}


def ran_out(message: Message, decision: RanOut) -> Decision:
    """Return what happens to a task that has run out of time before it has started."""
    task = message.app.tasks.get(message.task)
    retrying = getattr(getattr(task, "run", None), "retrying", None)
    if retrying is None or read_body(message.app, message.info) is None:
        return decision  # a retry without the arguments, which cannot be read, is another task
    request = context_of(message.app, message.info)
    request.headers = {**(request.headers or {}), QUEUE_HEADER: message.queue}
    request.hostname = gethostname()
    error = NotRun(decision.reason)
    try:
        if retrying.ended(request, error, not request.ignore_result) is not None:
            return Drop(f"{decision.reason}: it is retried", revoked=False, ends=False)
    except Reject as rejected:
        reason = f"{decision.reason}, and its retry cannot be sent: {rejected.reason}"
        return Delay(message.now_ms + AGAIN_MS, reason)
    is_buried = request.get("delayed_given_up")
    if not is_buried and GIVE_UP_HEADER in message.headers:
        is_buried = retrying.bury(request, decision.reason)
    if not is_buried:
        return decision
    store_failure(message.app, message.info, error)
    return Drop(decision.reason, revoked=False)


def _ask(
    strategy: RetryStrategy,
    message: Attempt,
    error: BaseException,
    attempt: int,
    max_retries: int | None,
) -> Retry | GiveUp:
    """Return a strategy's answer. A strategy that itself fails must not lose the task."""
    if max_retries is not None and attempt > max_retries:
        return GiveUp.after(attempt, error)
    try:
        answer = strategy.next(message, error, attempt)
        if isinstance(answer, Retry):
            end_ms = message.headers.get(GIVE_UP_HEADER)
            if type(end_ms) is int and answer.at_ms >= end_ms:
                return GiveUp(f"its time over all attempts ends, at last {describe(error)}")
            return Retry(int(answer.at_ms), dict(answer.changes))
        if isinstance(answer, GiveUp):
            return answer
        raise TypeError(f"a retry strategy must return Retry or GiveUp, not {answer!r}")
    except Exception as failure:
        logger.exception("The retry strategy of task %s[%s] has failed", message.task, message.id)
        return GiveUp(_broken(failure))


def _broken(failure: Exception) -> str:
    return f"its retry strategy has failed: {describe(failure)}"


def _is_of_broker(failure: Exception) -> bool:
    """Whether a retry could not be sent because of the broker, and not of its options."""
    return isinstance(failure, BROKER_FAILS) and not isinstance(failure, OptionError)


def _changes(answer: Retry, eta: Any, countdown: float | None) -> dict[str, Any]:
    if eta is None and countdown is None:
        return {**answer.changes, "eta": from_ms(answer.at_ms - clock.ahead_ms)}
    return {**answer.changes, "eta": eta, "countdown": countdown}
