"""The history of a task's failures, which its messages carry until it succeeds or is buried."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from .times import from_ms

#: JSON in a string, because the scripts skip strings in headers quickly.
HEADER = "delayed_failures"

#: An attribute of the ExceptionInfo of a task: whether it has become a dead letter.
BURIED = "delayed_buried"

#: The same, of a task that is retried: the queue or shard in which its retry holds its unique key.
RETRIED_IN = "delayed_retried_in"

#: How many of the last failures are kept, with how many frames and characters of each traceback.
KEPT, FRAMES, TRACEBACK_LENGTH = 20, 3, 1_000


@dataclass(frozen=True)
class Failure:
    """An attempt that has failed: when (ms), where, why, and the innermost frames."""

    attempt: int
    at_ms: int
    worker: str
    error: str
    traceback: str

    @property
    def at(self) -> datetime:
        return from_ms(self.at_ms)

    @classmethod
    def of(cls, error: BaseException, attempt: int, at_ms: int, worker: str) -> Failure:
        frames = traceback.format_tb(error.__traceback__, limit=-FRAMES)
        return cls(attempt, at_ms, worker, describe(error), "".join(frames)[-TRACEBACK_LENGTH:])


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {text_of(error)}".strip()[:300]


def text_of(error: Any) -> str:
    """The text of an error, or a note if the error cannot make its text."""
    try:
        return str(error)
    except Exception as failure:
        return f"(its text cannot be made: {type(failure).__name__})"


def read(text: Any) -> list[Failure]:
    """Read a history that `write` has written. Anything else gives an empty one."""
    try:
        return [Failure(**each) for each in json.loads(text)] if text else []
    except (ValueError, TypeError):
        return []


def write(failures: Iterable[Failure]) -> str:
    return json.dumps([asdict(failure) for failure in [*failures][-KEPT:]])


def before(headers: Mapping[str, Any] | None) -> list[Failure]:
    """The failures of earlier attempts in a task's headers."""
    return read((headers or {}).get(HEADER))
