"""How long a task may take, from its due time to its end."""

from __future__ import annotations

from typing import Any

from kombu_delayed.consumer.policy.decisions import Decision, Drop, Run
from kombu_delayed.message.durations import exact_text

from ..message import Message
from ..policy import Policy, PolicyError, length_ms
from ..retry.strategies import GIVE_UP_HEADER, OWN_LIMITS_HEADER, RanOut

#: The limits that the worker of this process gives to tasks without their own, if its pool can end
#: tasks; else empty.
worker_limits: dict[str, float | None] = {}


class Timeout(Policy):
    """Limits the time from the due time to the end: `Timeout("24h")`, by default a day.

    A task that has started gets the rest of the time as Celery's hard time limit, and a soft limit
    that is `soft` earlier. A task that runs out of time, waiting or running, is retried by its
    retry strategy, with the whole time again. Without a strategy, a task that has not started
    becomes a dead letter. With `then="drop"` it is dropped, and no strategy is asked. All attempts
    together end `max_age` after the task was first due: a running attempt is ended then, and
    nothing is retried later. After a pause of the queue, both times count from the end of the
    pause; `max_age` of a task that was retried before the pause does not. Raises PolicyError for
    invalid values.
    """

    needs_first_due = True

    def __init__(
        self, after: Any = "24h", *, then: str = "bury", soft: Any = None, max_age: Any = None
    ) -> None:
        if then not in ("bury", "drop"):
            raise PolicyError(f"Timeout(then={then!r}) takes 'bury' or 'drop'")
        self.after_ms = length_ms("Timeout", after)
        self.soft_ms = None if soft is None else length_ms("Timeout(soft=…)", soft)
        self._outcome: Any = RanOut if then == "bury" else Drop
        if self.soft_ms is not None and self.soft_ms >= self.after_ms:
            raise PolicyError(
                f"Timeout({after!r}, soft={soft!r}): soft must be shorter than the timeout"
            )
        self.max_age_ms = None if max_age is None else length_ms("Timeout(max_age=…)", max_age)
        if self.max_age_ms is not None and self.max_age_ms < self.after_ms:
            raise PolicyError(
                f"Timeout({after!r}, max_age={max_age!r}): all attempts together cannot have less "
                "time than one of them"
            )
        self._given = f"{exact_text(self.after_ms)!r}, then={then!r}"
        if self.max_age_ms is not None:
            self._given += f", max_age={exact_text(self.max_age_ms)!r}"

    def __repr__(self) -> str:
        return f"Timeout({self._given})"

    def decide(self, message: Message) -> Decision:
        """Run with the remaining time as the limit, or do not run."""
        end_ms, left_ms = self._end_ms(message), self.after_ms - message.overdue_ms
        reason = f"not started within {exact_text(self.after_ms)} of its due time"
        if end_ms is not None and end_ms - message.now_ms < left_ms:
            left_ms = end_ms - message.now_ms
            age = exact_text(self.max_age_ms or 0)
            reason = f"not done within {age} of when it was first due, over all attempts"
        if left_ms <= 0:
            decision: Decision = self._outcome(reason)
            return decision
        own = _limits(message.headers.get(OWN_LIMITS_HEADER, message.headers.get("timelimit")))
        soft_ms = None if self.soft_ms is None else max(left_ms - self.soft_ms, 1)
        usual = _usual_limits(message)
        limits = [
            _shorter(own[0] or usual[0], left_ms),
            _shorter(own[1] or usual[1], soft_ms),
        ]
        ends = {} if end_ms is None else {GIVE_UP_HEADER: end_ms}
        return Run({"timelimit": limits, OWN_LIMITS_HEADER: own, **ends})

    def _end_ms(self, message: Message) -> int | None:
        """Return when all attempts end, which retries carry along; None without `max_age`."""
        if self.max_age_ms is None:
            return None
        brought = message.headers.get(GIVE_UP_HEADER)
        if type(brought) is int:
            return brought
        return message.now_ms - message.overdue_ms + self.max_age_ms


def _usual_limits(message: Message) -> list[float | None]:
    """The hard and soft limit that Celery would enforce if the message had none."""
    if not worker_limits:
        return [None, None]
    task = message.app.tasks.get(message.task)
    return [
        getattr(task, name, None) or worker_limits.get(name)
        for name in ("time_limit", "soft_time_limit")
    ]


def _limits(given: Any) -> list[float | None]:
    """Hard and soft limit in seconds, as Celery has them in a message."""
    if isinstance(given, (list, tuple)) and len(given) == 2:
        return [each if isinstance(each, (int, float)) else None for each in given]
    return [None, None]


def _shorter(seconds: float | None, limit_ms: int | None) -> float | None:
    limits = [seconds, None if limit_ms is None else limit_ms / 1000]
    return min((each for each in limits if each is not None), default=None)
