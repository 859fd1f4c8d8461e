"""The options that the creator of an HTTP job may choose: its request and its retries."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from celery_ext.policies.retry.strategies import Backoff

from .ssrf_guard import CallbackRefused

#: The wait before the first retry of a job; it doubles with each retry.
FIRST_SECONDS = 10

#: The most headers of one request, and the most characters of all of them together.
MOST_HEADERS, MOST_CHARACTERS = 50, 8_000

#: Methods whose requests have no body.
WITHOUT_BODY = ("GET", "DELETE")

#: Headers that frame the request or belong to the connection.
DENIED = {
    *("connection", "content-encoding", "content-length", "expect", "host", "keep-alive"),
    *("proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer"),
    *("transfer-encoding", "upgrade"),
}

#: Headers that we set and sign.
OURS = ("delayed-", "webhook-")

_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_VALUE = re.compile(r"[\x20-\x7e]{0,4000}")


def check_headers(headers: Mapping[str, str]) -> None:
    """Raises CallbackRefused for a header that a job may not send. It shows no values: secrets."""
    seen: set[str] = set()
    for name, value in headers.items():
        plain = name.lower()
        if not _NAME.fullmatch(name):
            raise CallbackRefused(f"{name[:100]!r} is not the name of a header")
        if plain in DENIED or plain.startswith(OURS):
            raise CallbackRefused(f"{name!r} cannot be set: the worker sets it; leave it out")
        if plain in seen:
            raise CallbackRefused(f"{name!r} is given twice; case does not matter")
        if not _VALUE.fullmatch(value):
            raise CallbackRefused(f"the value of {name!r} must be up to 4000 characters of ASCII")
        seen.add(plain)
    size = sum(len(name) + len(value) for name, value in headers.items())
    if len(headers) > MOST_HEADERS or size > MOST_CHARACTERS:
        raise CallbackRefused(
            f"{len(headers)} headers of {size} characters are too many: "
            f"give up to {MOST_HEADERS} of {MOST_CHARACTERS} characters in all"
        )


def backoff_seconds(retries: int) -> int:
    """How long to wait after some number of retries: 10, 20, 40 … s, at most a day."""
    return min(FIRST_SECONDS * 2 ** min(retries, 20), 86_400)


@dataclass(frozen=True)
class JobOptions:
    """A job's options. It stores only those that were chosen; `backoff` is as for `Backoff`."""

    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float | None = None
    backoff: Mapping[str, Any] | None = None
    failure_callback: str | None = None

    def seconds(self, default: float, longest: float) -> float:
        """The timeout of the job's request."""
        return default if self.timeout is None else min(self.timeout, longest)

    def pause_seconds(self, retries: int) -> float:
        """How long to wait after some number of retries, in seconds."""
        if self.backoff is None:
            return backoff_seconds(retries)
        jitter = self.backoff.get("jitter", 0)
        pause = Backoff(**self.backoff).pause_seconds(retries + 1)
        return pause * random.uniform(1 - jitter, 1 + jitter)

    def with_headers(self, ours: Mapping[str, str]) -> dict[str, str]:
        """The job's headers, and those of `ours` that it does not set. Raises CallbackRefused."""
        check_headers(self.headers)
        own = {name.lower() for name in self.headers}
        return {**{name: ours[name] for name in ours if name.lower() not in own}, **self.headers}
