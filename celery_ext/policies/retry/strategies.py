"""Decides when a task that has failed is tried again, and when no more."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from celery_ext.tasks.failures import describe
from kombu_delayed.consumer.policy.decisions import Bury, Decision, Run
from kombu_delayed.message.durations import exact_text

from ..message import Message
from ..policy import Policy, PolicyError, length_ms

#: The header in which a task's process finds the queue that its message came from.
QUEUE_HEADER = "delayed_queue"

#: The header of a retry with the time at which the first attempt failed, in ms.
FIRST_HEADER = "delayed_first_failure"


#: The header, from the first attempt on, with the time after which there is no other, in ms.
GIVE_UP_HEADER = "delayed_give_up_at"

#: The header with the limits that a task was sent with, if its `Timeout` has set others.
OWN_LIMITS_HEADER = "delayed_own_limits"

#: The header in which a consumer names the strategy that is declared in Redis, if the process that
#: runs the task would use another.
STRATEGY_HEADER = "delayed_strategy"


#: The default of `longest`, and the longest pause that a `Backoff` takes.
LONGEST_SECONDS, MOST_SECONDS = 3600, 10 * 366 * 86_400


@dataclass(frozen=True)
class Attempt:
    """A failed task, in the process that ran it. Times are ms by the clock of that process."""

    id: str
    task: str
    queue: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    headers: Mapping[str, Any]
    now_ms: int
    #: When it has failed for the first time.
    first_failure_ms: int = 0

    @property
    def tenant(self) -> str | None:
        """The header `tenant`."""
        found = self.headers.get("tenant")
        return None if found is None else str(found)


@dataclass(frozen=True)
class Retry:
    """The task is retried at a time, in ms since the epoch.

    `changes` are options of `apply_async` for the retry, including `args` and `kwargs`.
    """

    at_ms: int
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class GiveUp:
    """The task is not retried and becomes a dead letter."""

    reason: str

    @classmethod
    def after(cls, attempts: int, error: BaseException) -> GiveUp:
        """Give up after this many failed attempts, the last one with this error."""
        times = "once" if attempts == 1 else f"{attempts} times, at last"
        return cls(f"failed {times} with {describe(error)}")


class RanOut(Bury):
    """The message becomes a dead letter unless its retry strategy retries it."""


class RetryStrategy(Policy):
    """Decides when a failed task is retried. Subclasses define `next`."""

    def next(self, message: Attempt, error: BaseException, attempt: int) -> Retry | GiveUp:
        """Decide about an error. `attempt` counts from 1."""
        raise NotImplementedError

    def decide(self, message: Message) -> Decision:
        """Run, and pass the strategy on to the process of the task."""
        return Run({QUEUE_HEADER: message.queue})


class Backoff(RetryStrategy):
    """Retries with growing pauses: `Backoff(10)` after 10, 20, 40 … seconds, six runs in all.

    `seconds` is a list of all pauses, or the first pause, which grows by `factor` (1: it does not
    grow) up to `longest`, by default an hour or the longest pause that was given. `jitter` is the
    fraction by which a pause is randomly longer or shorter. The task becomes a dead letter after
    this number of `retries`, at the end of the list, or if a retry would come later than `max_age`
    ("24h") after the first failure. Raises PolicyError for invalid values.
    """

    def __init__(
        self,
        seconds: float | Sequence[float],
        *,
        factor: float = 2,
        longest: float | None = None,
        jitter: float = 0,
        retries: int | None = None,
        max_age: Any = None,
    ) -> None:
        is_list = isinstance(seconds, (list, tuple))
        pauses: Any = seconds if is_list else [seconds]
        if not pauses or not all(_is_number(each) and 0 <= each <= MOST_SECONDS for each in pauses):
            raise PolicyError(f"Backoff takes seconds, or a list of them, not {seconds!r}")
        for name, value, least, most in (
            ("factor", factor, 1, 1000),
            ("longest", LONGEST_SECONDS if longest is None else longest, 0, MOST_SECONDS),
            ("jitter", jitter, 0, 1),
            ("retries", 0 if retries is None else retries, 0, 1_000_000),
        ):
            if not (_is_number(value) and least <= value <= most):
                raise PolicyError(f"Backoff({name}={value!r}) takes {least:,} to {most:,}")
        if retries is not None and retries != int(retries):
            raise PolicyError(f"Backoff(retries={retries!r}) takes a whole number")
        self._pauses = tuple(pauses)
        self._factor = 1 if is_list else factor
        self._longest = max(LONGEST_SECONDS, *pauses) if longest is None else longest
        self._jitter = jitter
        self.retries = (len(pauses) if is_list else 5) if retries is None else int(retries)
        self.max_age_ms = None if max_age is None else length_ms("Backoff(max_age=…)", max_age)
        self._given = f"{seconds!r}, factor={factor!r}, longest={longest!r}, jitter={jitter!r}"

    def __repr__(self) -> str:
        age = "" if self.max_age_ms is None else f", max_age={exact_text(self.max_age_ms)!r}"
        return f"Backoff({self._given}, retries={self.retries}{age})"

    def pause_seconds(self, attempt: int) -> float:
        """The pause after an attempt, counted from 1, without jitter."""
        listed = self._pauses[min(attempt, len(self._pauses)) - 1]
        grown: float = listed * self._factor ** min(attempt - 1, 100)
        return min(grown, self._longest)

    def next(self, message: Attempt, error: BaseException, attempt: int) -> Retry | GiveUp:
        """Retry after the pause, as long as there is one."""
        if attempt > self.retries:
            return GiveUp.after(attempt, error)
        pause = self.pause_seconds(attempt) * random.uniform(1 - self._jitter, 1 + self._jitter)
        at_ms = message.now_ms + round(pause * 1000)
        if self.max_age_ms is not None and at_ms > message.first_failure_ms + self.max_age_ms:
            age = exact_text(self.max_age_ms)
            return GiveUp(f"not retried for longer than {age}, at last {describe(error)}")
        return Retry(at_ms)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
