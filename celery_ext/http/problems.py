"""Errors as RFC 9457 has them: what is wrong, with which field."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from kombu.exceptions import OperationalError
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from kombu_delayed.errors import UNREACHABLE, DelayedError

MEDIA_TYPE = "application/problem+json"

#: What a call raises while the broker does not answer.
BROKER_FAILS = (DelayedError, OperationalError, RedisError, *UNREACHABLE)

#: Characters of what somebody sent that are shown in a problem.
SHOWN = 200


class Problem(HTTPException):
    """An answer that is an error. `errors` are fields with what is wrong about each."""

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
        """One field is wrong."""
        return cls(status, f"{field}: {detail}", errors=[(field, detail)])

    def as_dict(self) -> dict[str, Any]:
        """The members of the JSON object."""
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
    """It may be tried again in a while."""
    return Problem(status, detail, headers={"Retry-After": str(seconds)})


def broker_away() -> Problem:
    """Redis does not answer."""
    return busy("the broker cannot be asked now", 503, 5)


def answer(problem: Problem) -> Response:
    """The response for a problem."""
    text = json.dumps(problem.as_dict())
    headers = dict(problem.headers or {})
    return Response(text, problem.status_code, headers, media_type=MEDIA_TYPE)
