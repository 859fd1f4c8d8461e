"""The errors of this extension, in addition to those of kombu_delayed."""

from __future__ import annotations

from typing import Protocol

from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from kombu_delayed.errors import UNREACHABLE, DelayedError

#: Errors of a call that the broker does not answer or cannot carry out.
BROKER_FAILS = (DelayedError, OperationalError, RedisError, *UNREACHABLE)


class Stored(Protocol):
    """The numbers of messages that are certainly stored, as in a BulkReport."""

    delayed: int
    ready: int
    already: int


class BrokerError(DelayedError):
    """The app's broker has no backlog: put `delayed+` in front of its URL."""


class QueryError(DelayedError, ValueError):
    """A query or a change has an invalid value."""


class StillRunning(DelayedError, TimeoutError):
    """Tasks of a queue that was paused to drain it still run."""

    def __init__(self, queue: str = "", count: int = 0) -> None:
        """`count` is how many tasks workers have."""
        self.queue, self.count = queue, count
        super().__init__(queue, count)

    def __str__(self) -> str:
        return (
            f"queue {self.queue!r} is paused, but its workers still have {self.count:,} "
            f"{'task' if self.count == 1 else 'tasks'}: wait for longer, or terminate them"
        )


class BulkError(DelayedError, OperationalError):
    """The broker failed in the middle of bulk scheduling.

    `report` counts what is certainly stored; messages in flight may be stored as well.
    """

    def __init__(self, message: str, report: Stored | None = None) -> None:
        super().__init__(message, report)
        self.report = report

    def __str__(self) -> str:
        return str(self.args[0])


class BackupError(DelayedError, ValueError):
    """A file or a directory is not a backup, or is damaged, truncated or of another version."""


class ExpectationError(DelayedError, ValueError):
    """An expectation or an answer has an invalid value."""


class AlreadyExpected(DelayedError):
    """Another task expects an answer under the same key; this one does not.

    `expectation_id` is the id of the expectation that is open.
    """

    def __init__(self, key: str = "", expectation_id: str = "") -> None:
        """`key` is the key that both tasks use."""
        self.key, self.expectation_id = key, expectation_id
        super().__init__(key, expectation_id)

    def __str__(self) -> str:
        return (
            f"expectation {self.expectation_id} is open for the key {self.key!r}: use a key that "
            "stands for one question only, such as the id of a payment"
        )


class AnswersFull(DelayedError, OperationalError):
    """The limit of early answers is reached, so this one is not kept: try again later."""


class AnswerFailed(DelayedError):
    """The other side reported a failure; the text has the reason."""


class AnswerTimeout(DelayedError):
    """No answer has come in time."""
