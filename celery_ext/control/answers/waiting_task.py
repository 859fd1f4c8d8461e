"""The task that waits in the broker for an answer, and then sends the follow-up."""

from __future__ import annotations

import time
from typing import Any

from celery import Celery, Task
from celery.canvas import maybe_signature
from celery.exceptions import Ignore, Reject
from celery.utils.log import get_task_logger
from kombu.exceptions import OperationalError
from kombu.utils.json import loads

from celery_ext.app import signals
from celery_ext.errors import AnswerFailed, AnswerTimeout
from celery_ext.tasks.times import OWN_LIMIT_SECONDS
from kombu_delayed.errors import UNREACHABLE, NotReplicated
from kombu_delayed.inspection.expectations import ANSWER_HEADER, Settled

from .expectation_queue import ExpectationQueue, name_of

#: The name of the task.
TASK = "celery_ext.expectation"

#: Failures of the task that are normal outcomes.
ENDS = (AnswerFailed, AnswerTimeout)

#: Errors of the broker, or of other services that Celery needs to send, that may soon pass.
NOT_NOW: tuple[type[BaseException], ...] = (OperationalError, NotReplicated, *UNREACHABLE)

#: The pause before the next attempt to send the follow-up.
PAUSE_SECONDS = 1.0

logger = get_task_logger(__name__)


def register(app: Celery) -> Task:
    """Let an app's workers run the task. Safe to call twice."""
    return app.task(
        _run,
        name=TASK,
        bind=True,
        shared=False,
        acks_late=True,
        reject_on_worker_lost=True,
        max_retries=0,
        time_limit=OWN_LIMIT_SECONDS,  # killed at a limit, it would count as done
        soft_time_limit=OWN_LIMIT_SECONDS,
        throws=ENDS,
        dont_autoretry_for=ENDS,
    )


def _run(
    task: Task,
    key: str,
    tenant: str | None = None,
    on_response: Any = None,
    on_timeout: Any = None,
    on_failure: Any = None,
) -> Any:
    """Return the payload of the answer. Raises AnswerFailed or AnswerTimeout."""
    given = {"answered": on_response, "failed": on_failure, "timed_out": on_timeout}
    state, content = _sent(task, key, tenant, given)
    if state == "answered":
        return content
    if state == "failed":
        raise AnswerFailed(content)
    raise AnswerTimeout(f"no answer arrived in time for the key {key!r}")


def _sent(task: Task, key: str, tenant: str | None, given: dict[str, Any]) -> tuple[str, Any]:
    """Send the follow-up, and return how the expectation ended, and with what content.

    Raises Ignore for a copy of an expectation that has ended otherwise. Raises Reject if the
    follow-up cannot be sent: with a requeue if it cannot be sent now, else as a dead letter.
    """
    id = task.request.id
    try:
        state, content = _end(key, (task.request.headers or {}).get(ANSWER_HEADER))
        settled = _settle(task, key, tenant, state)
        if settled.answer is not None:
            state, content = _end(key, settled.answer)
        if not settled.may_follow:
            logger.warning("Expectation %s of %r has already ended: nothing is sent", id, key)
            raise Ignore()
        if given[state] is not None:
            maybe_signature(given[state], app=task.app).apply_async((content,))
    except Ignore:
        raise
    except NOT_NOW as error:
        time.sleep(PAUSE_SECONDS)
        raise Reject(f"the follow-up cannot be sent now: {error}", requeue=True) from error
    except Exception as error:
        logger.exception("Expectation %s of %r becomes a dead letter", id, key)
        raise Reject(f"the follow-up cannot be sent: {error}", requeue=False) from error
    signals.expectation_ended.send(sender=task.app, key=key, tenant=tenant, id=id, state=state)
    return state, content


def _end(key: str, text: str | None) -> tuple[str, Any]:
    """The state, and the argument of the follow-up. Without an answer it has timed out."""
    if text is None:
        return "timed_out", key
    answer = loads(text)
    return ("failed", answer["error"]) if "error" in answer else ("answered", answer["payload"])


def _settle(task: Task, key: str, tenant: str | None, state: str) -> Settled:
    queue, id = ExpectationQueue(task.app), task.request.id
    name, kept_ms = name_of(key, tenant), queue.options.remember_ms
    return queue.move(lambda correlation: correlation.settle(name, id, state, kept_ms))
