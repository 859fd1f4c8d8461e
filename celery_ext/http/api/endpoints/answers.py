"""Answers of outside systems that tasks expect."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from celery_ext.control.answers.answering import EARLY, LATE, UNKNOWN
from celery_ext.control.answers.expectation_queue import KEY_LENGTH
from celery_ext.errors import AnswersFull, ExpectationError
from celery_ext.http.problems import Problem, busy

from ..models import AnswerOutcome, NewAnswer
from ..operations import Call, Json, Operations

operations = Operations("responses")


@operations.add(
    "POST",
    "/v1/responses/{key}",
    "schedule",
    {200: AnswerOutcome, 202: AnswerOutcome},
    body=NewAnswer,
    problems=(404, 409),
)
def give_answer(call: Call) -> Response:
    """Answer a task under a key. 202: no task expects it yet, and it is kept."""
    key = call.named("key")
    if not 1 <= len(key) <= KEY_LENGTH:
        raise Problem.of_field("key", f"a key has 1 to {KEY_LENGTH:,} characters")
    call.note("respond", key)
    outcome = _give(call, key, call.body)
    if outcome == LATE:
        raise Problem(409, "another answer, or the timeout, was first")
    if outcome == UNKNOWN:
        raise Problem(404, "no task expects an answer under this key")
    return Json({"key": key, "outcome": outcome}, 202 if outcome == EARLY else 200)


def _give(call: Call, key: str, new: NewAnswer) -> str:
    expectations = call.service.delayed.expectations
    call.identity.check_queue(expectations.queue)
    named: dict[str, Any] = {"tenant": call.identity.tenant_for(new.tenant), "answer_id": new.id}
    try:
        if new.error is not None:
            return expectations.fail(key, new.error, **named)
        return expectations.respond(key, new.payload, **named)
    except AnswersFull as error:
        raise busy(str(error), 503, 60) from error
    except ExpectationError as error:
        field = "payload" if new.error is None else "error"
        raise Problem.of_field(field, str(error)) from error
