"""Errors in the format of RFC 9457: what is wrong, and with which field."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from ..control.policies.declared import PartlyDone
from ..errors import BROKER_FAILS, QueryError

MEDIA_TYPE = "application/problem+json"

#: How many characters of a client's input a problem shows.
SHOWN = 200

#: How often the log has an error of the broker, for each type of error.
LOG_SECONDS = 10

logger = logging.getLogger(__name__)

_logged: dict[type[BaseException], float] = {}


class Problem(HTTPException):
    """An error answer. `errors` has each invalid field with its error."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        errors: Sequence[tuple[str, str]] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, detail, dict(headers or {}))
        self.errors = errors

    @classmethod
    def of_field(cls, field: str, detail: str, status: int = 422) -> Problem:
        """A problem with one field."""
        return cls(status, f"{field}: {detail}", errors=[(field, detail)])

    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "type": "about:blank",
            "title": HTTPStatus(self.status_code).phrase,
            "status": self.status_code,
            "detail": self.detail,
        }
        if self.errors:
            found["errors"] = [{"field": name, "detail": text} for name, text in self.errors]
        return found


def busy(detail: str, status: int = 503, seconds: int = 1) -> Problem:
    """A problem that asks the client to try again after some seconds."""
    return Problem(status, detail, headers={"Retry-After": str(seconds)})


def broker_failed(error: Exception, detail: str) -> Problem:
    """The problem of a call that failed at the broker. The log has the reason, clients do not."""
    now, reason = time.monotonic(), error.__cause__ or error
    if now - _logged.get(type(reason), -math.inf) >= LOG_SECONDS:
        _logged[type(reason)] = now
        text = " ".join(str(reason).split())
        logger.warning("The broker fails: %s: %s", type(reason).__name__, text)
    return busy(detail, 503, 5)


def refused(reason: str) -> Problem:
    """The problem of a task that Celery or the broker did not accept."""
    return Problem(422, f"the task cannot be sent: {reason}"[:400])


def problem_of(error: Exception) -> Problem:
    """The problem that a client gets for an error."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, QueryError):
        name, _, detail = str(error).partition("=")
        return Problem.of_field(name, str(error)) if detail else Problem(422, str(error))
    if isinstance(error, BROKER_FAILS):
        is_partly_done = isinstance(error, PartlyDone)
        detail = error.advice if is_partly_done else "the broker cannot be reached now"
        return broker_failed(error, detail)
    return Problem(500, "internal error: the server's log has the details")


def answer(problem: Problem) -> Response:
    text = json.dumps(problem.as_dict())
    headers = dict(problem.headers or {})
    return Response(text, problem.status_code, headers, media_type=MEDIA_TYPE)
