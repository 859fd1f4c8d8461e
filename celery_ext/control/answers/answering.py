"""Delivers answers, from any program that receives them."""

from __future__ import annotations

import uuid
from typing import Any

from celery import Celery
from kombu.utils.json import dumps, loads

from celery_ext.app import signals
from celery_ext.errors import AnswersFull, ExpectationError
from kombu_delayed.inspection.expectations import Answer, Early

from .expectation_queue import ExpectationQueue, name_of

#: The outcomes of an answer: it was expected; it is kept until a task expects it; another answer
#: or the timeout was first; or no task expects it and early answers are not kept.
ACCEPTED, EARLY, LATE, UNKNOWN = "accepted", "early", "late", "unknown"


def respond(
    app: Celery,
    key: str,
    payload: Any = None,
    *,
    tenant: str | None = None,
    answer_id: str | None = None,
) -> str:
    """Deliver the answer that a task expects under a key. Any program may call it.

    Returns ACCEPTED, EARLY, LATE or UNKNOWN. `payload` is anything that Kombu can serialize as
    JSON. If you may send the same answer twice, for instance as the consumer of a log, give it an
    `answer_id`: the second call then returns the result of the first. Raises ExpectationError for
    an invalid answer, AnswersFull if too many early answers are kept, and Kombu's OperationalError
    if the broker cannot be reached.
    """
    return answer(ExpectationQueue(app), key, tenant, answer_id, {"payload": payload})


def fail(
    app: Celery,
    key: str,
    error: BaseException | str,
    *,
    tenant: str | None = None,
    answer_id: str | None = None,
) -> str:
    """Report, like `respond`, that there will be no answer, with the reason."""
    return answer(ExpectationQueue(app), key, tenant, answer_id, {"error": error_text(error)})


def error_text(error: BaseException | str) -> str:
    return f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else str(error)


def answer(
    queue: ExpectationQueue,
    key: str,
    tenant: str | None,
    answer_id: str | None,
    content: dict[str, Any],
) -> str:
    """Like `respond`, with a content that has a `payload` or an `error`."""
    name, options = name_of(key, tenant), queue.options
    state = "failed" if "error" in content else "answered"
    text = written(content, options.answer_bytes)
    given = Answer(answer_id or str(uuid.uuid4()), state, text)
    early = Early(int(options.early_seconds * 1000), options.early_limit)
    reply = queue.move(
        lambda correlation: correlation.respond(name, given, options.remember_ms, early)
    )
    if reply.said == "full":
        raise AnswersFull(f"{options.early_limit:,} early answers are kept: try again later")
    signals.answer_given.send(
        sender=queue.app, key=key, tenant=tenant, id=reply.id or None, outcome=reply.said
    )
    return reply.said


def written(content: dict[str, Any], limit_bytes: int) -> str:
    """An answer as JSON. Raises ExpectationError if it cannot be read back, or is too long."""
    try:
        text: str = dumps(content)
        loads(text)
    except Exception as error:  # a payload's own types may raise anything
        raise ExpectationError(f"the answer cannot be kept as JSON: {error}"[:300]) from error
    if len(text) > limit_bytes:
        raise ExpectationError(f"the answer has {len(text):,} bytes, at most {limit_bytes:,}")
    return text
