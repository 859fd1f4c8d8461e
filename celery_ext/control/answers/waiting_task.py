"""The task that waits in the broker for an answer, and sends what follows from it."""

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

#: What it is called.
TASK = "celery_ext.expectation"

#: How it fails where all is in order.
ENDS = (AnswerFailed, AnswerTimeout)

#: The broker, or what else Celery asks when it sends, may answer soon.
NOT_NOW: tuple[type[BaseException], ...] = (OperationalError, NotReplicated, *UNREACHABLE)

#: Between two tries to send what follows.
PAUSE_SECONDS = 1.0

logger = get_task_logger(__name__)


def register(app: Celery) -> Task:
    """Let an app's workers run it; twice is safe."""
    return app.task(
        _run,
        name=TASK,
        bind=True,
        shared=False,
        acks_late=True,
        reject_on_worker_lost=True,
        max_retries=0,
        time_limit=OWN_LIMIT_SECONDS,  # a task that is killed for it counts as done
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
    """Its result is the payload of the answer. Raises AnswerFailed, AnswerTimeout."""
    given = {"answered": on_response, "failed": on_failure, "timed_out": on_timeout}
    state, content = _sent(task, key, tenant, given)
    if state == "answered":
        return content
    if state == "failed":
        raise AnswerFailed(content)
    raise AnswerTimeout(f"no answer arrived in time for the key {key!r}")


def _sent(task: Task, key: str, tenant: str | None, given: dict[str, Any]) -> tuple[str, Any]:
    """How the expectation has ended, and with what, after what follows was sent.

    Raises Ignore for a copy of one that has ended otherwise, and Reject where what follows cannot
    be sent: now, so that this comes again, or ever, so that it is a dead letter.
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
    """State and what follows is to be given: without an answer the time is over."""
    if text is None:
        return "timed_out", key
    answer = loads(text)
    return ("failed", answer["error"]) if "error" in answer else ("answered", answer["payload"])


def _settle(task: Task, key: str, tenant: str | None, state: str) -> Settled:
    queue, id = ExpectationQueue(task.app), task.request.id
    name, kept_ms = name_of(key, tenant), queue.options.remember_ms
    return queue.move(lambda correlation: correlation.settle(name, id, state, kept_ms))
