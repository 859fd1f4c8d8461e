"""Shows, answers and cancels the expectations of an app."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from celery_ext.app.queues import Queues
from celery_ext.tasks.task_info import TaskInfo
from celery_ext.tasks.times import from_ms, info_data
from kombu_delayed.inspection.expectations import Note

from .answering import answer, error_text
from .expectation_queue import ExpectationQueue, key_of, name_of


@dataclass(frozen=True)
class ExpectationInfo:
    """An expectation under a key of a tenant, or an answer that came before its question.

    `state` is "open", "answered", "failed", "timed_out", "cancelled" or "early", since `at`. `id`
    is the id of the expectation, whose result is the answer; None for an early answer. `due` is the
    timeout of an open expectation. The broker forgets it at `until`.
    """

    key: str
    tenant: str | None
    state: str
    id: str | None
    at: datetime
    until: datetime
    due: datetime | None = None

    @classmethod
    def of(cls, note: Note, now_ms: int) -> ExpectationInfo:
        """Read a note. An open one whose message is gone has timed out or was cancelled."""
        key, tenant = key_of(note.name)
        state = note.state
        if state == "open" and not note.is_waiting:
            # Its message has left the backlog: to a consumer, or dropped before it was due.
            state = "timed_out" if (note.due_ms or 0) <= now_ms else "cancelled"
        due = from_ms(note.due_ms) if state == "open" and note.due_ms is not None else None
        at, until = from_ms(note.at_ms), from_ms(note.until_ms)
        return cls(key, tenant, state, note.id or None, at, until, due)

    def as_dict(self) -> dict[str, Any]:
        return info_data(self)


class Expectations:
    """Expectations of an app's broker (`Delayed.expectations`). No worker needs to run."""

    def __init__(self, delayed: Queues) -> None:
        self._delayed = delayed
        self._queue = ExpectationQueue(delayed.app, delayed)

    @property
    def queue(self) -> str:
        """The queue in which they wait."""
        return self._queue.options.queue

    @property
    def limit_bytes(self) -> int:
        """The maximum size of an answer as JSON."""
        return self._queue.options.answer_bytes

    def list(self, tenant: str | None = None) -> Iterator[ExpectationInfo]:
        """All expectations, or those of one tenant, unordered, read lazily."""
        for page in self._queue.correlation.pages():
            now_ms = int(time.time() * 1000)
            for note in page:
                if note.is_waiting or note.until_ms > now_ms:
                    info = ExpectationInfo.of(note, now_ms)
                    if tenant in (None, info.tenant):
                        yield info

    def get(self, key: str, tenant: str | None = None) -> ExpectationInfo | None:
        """The expectation of a key, or None."""
        note, now_ms = self._queue.correlation.get(name_of(key, tenant)), int(time.time() * 1000)
        if note is None or not (note.is_waiting or note.until_ms > now_ms):
            return None
        return ExpectationInfo.of(note, now_ms)

    def respond(
        self,
        key: str,
        payload: Any = None,
        *,
        tenant: str | None = None,
        answer_id: str | None = None,
    ) -> str:
        """Like `celery_ext.respond`."""
        return answer(self._queue, key, tenant, answer_id, {"payload": payload})

    def fail(
        self,
        key: str,
        error: BaseException | str,
        *,
        tenant: str | None = None,
        answer_id: str | None = None,
    ) -> str:
        """Like `celery_ext.fail`."""
        return answer(self._queue, key, tenant, answer_id, {"error": error_text(error)})

    def cancel(self, key: str, tenant: str | None = None) -> bool:
        """Cancel an expectation. True if it was open. Its result is REVOKED."""
        kept_ms = self._queue.options.remember_ms
        waiting = self._queue.correlation.cancel(name_of(key, tenant), kept_ms)
        if waiting is None:
            return False
        self._delayed.was_cancelled(TaskInfo.waiting(self.queue, waiting))
        return True
