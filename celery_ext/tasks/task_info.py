"""Information about one task that waits, runs or was buried."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kombu_delayed.inspection.backlog import Waiting
from kombu_delayed.inspection.lookup import Found
from kombu_delayed.message import clock
from kombu_delayed.message.packing import Glance
from kombu_delayed.message.wait import Wait
from kombu_delayed.store.calls.shards import queue_of

from .arguments import arguments_of
from .history import Step, TaskHistory
from .times import from_ms

#: The first task in a message is its header's: in the body, which is text, quotes are escaped.
_TASK = re.compile(rb'"task": ?"((?:[^"\\]|\\.)*)"')

_DELIVERIES = re.compile(rb', ?"deliveries": ?(\d+)\}$')


@dataclass(frozen=True)
class TaskInfo:
    """A task in the broker. Its message is decoded when you first read one of its fields.

    `state` is "delayed", "waiting" (due, but waits for its turn or a limit), "ready", "unacked"
    (claimed by a worker, running or about to run) or "dead". `Delayed.get` also returns states from
    the records of workers: "running", "retrying", "succeeded", "failed", "cancelled", "expired",
    "rejected", "ignored" and "lost" (its process is gone); `history` has the details.
    `step` is the priority step of its ready list. `due_ms` is ms since the epoch, None for a
    task without an ETA. `consumer` is its current or last consumer. `reason` is why it became a
    dead letter or is retried, how it failed, or why a policy delayed it.
    """

    state: str
    queue: str
    step: int
    message: bytes = field(repr=False)
    due_ms: int | None = None
    consumer: str = ""
    reason: str = ""
    #: Its name in the backlog: its id, or a longer one if several tasks share an id.
    member: str = field(default="", repr=False)
    #: The deliveries in the note of a dead letter; None: they are in the message.
    counted: int | None = field(default=None, repr=False)
    #: The records of workers; None if there are none, or if they were not read.
    history: TaskHistory | None = field(default=None, repr=False, compare=False)

    @classmethod
    def recorded(cls, history: TaskHistory) -> TaskInfo:
        """A task known from its record: its message is gone, or held by a worker."""
        state = "unacked" if history.state == "received" else history.state
        failure = history.failure if state in ("failed", "lost") else None
        reason = failure.said if failure else ""
        return cls(
            state,
            history.queue,
            0,
            b"",
            consumer=history.worker,
            reason=reason,
            member=history.id,
            history=history,
        )

    def with_history(self, history: TaskHistory) -> TaskInfo:
        """This task with its record; a delayed one may be a retry, with the error before it."""
        if self.state != "delayed" or history.state != "retrying":
            return replace(self, history=history)
        return replace(self, state="retrying", reason=history.steps[-1].said, history=history)

    @classmethod
    def of(cls, found: Found) -> TaskInfo:
        """A task that was looked up by its id."""
        return cls(
            found.state,
            queue_of(found.queue),
            found.step,
            found.message,
            found.due_ms,
            found.consumer,
            found.reason or Wait.in_message(found.message).reason,
            counted=found.deliveries,
        )

    @classmethod
    def waiting(cls, queue: str, waiting: Waiting) -> TaskInfo:
        if (seen := waiting.seen) is not None:
            return cls._unread(queue_of(queue), waiting, seen)
        kept = waiting.kept
        return cls(
            "delayed",
            queue_of(queue),
            kept.step,
            kept.message,
            kept.due_ms,
            reason=Wait.in_message(kept.message).reason,
            member=waiting.member,
        )

    @classmethod
    def _unread(cls, queue: str, waiting: Waiting, seen: Glance) -> TaskInfo:
        """A task whose message is read on first use."""
        info = cls.__new__(cls)
        info.__dict__.update(
            state="delayed",
            queue=queue,
            step=seen.step,
            due_ms=seen.due_ms,
            member=waiting.member,
            task=seen.task.decode(errors="replace"),
            _waiting=waiting,
        )
        return info

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Read the message of such a task."""
            if name != "message":
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            message = self.__dict__["message"] = self._waiting.kept.message
            return message

    def __getstate__(self) -> dict[str, Any]:
        """Read the message for copies in other processes."""
        _ = self.message
        return {name: value for name, value in vars(self).items() if name != "_waiting"}

    @cached_property
    def payload(self) -> dict[str, Any]:
        """Kombu's message: body, headers, properties."""
        try:
            found = json.loads(self.message)
        except (ValueError, RecursionError):  # a dead letter may be anything
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def headers(self) -> dict[str, Any]:
        """The task's headers."""
        return self._member("headers")

    @property
    def properties(self) -> dict[str, Any]:
        """Kombu's properties of the message."""
        return self._member("properties")

    def _member(self, name: str) -> dict[str, Any]:
        found = self.payload.get(name)
        return found if isinstance(found, dict) else {}

    @property
    def priority(self) -> int:
        """The priority; a lower number is more urgent."""
        found = self.properties.get("priority")
        return found if type(found) is int else self.step

    @property
    def id(self) -> str:
        """The task id."""
        if self.member:
            return self.member.partition("\x1f")[0]
        return str(self.headers.get("id") or "")

    @cached_property
    def task(self) -> str:
        """The name of the task; empty for a message that is not a task."""
        if not self.message and self.history is not None:
            return self.history.task
        return task_in(self.message)

    @property
    def arguments(self) -> tuple[Any, Any] | None:
        """The positional and keyword arguments; None if they cannot be read safely here.

        JSON, YAML and MessagePack can be read, plain or compressed with gzip or bzip2, but no
        pickled or signed body.
        """
        return arguments_of(self.payload)

    @property
    def args(self) -> str:
        """The positional arguments as Celery shows them."""
        if not self.message and (failure := self._failure):
            return failure.args
        return str(self.headers.get("argsrepr") or "")

    @property
    def kwargs(self) -> str:
        """The keyword arguments as Celery shows them."""
        if not self.message and (failure := self._failure):
            return failure.kwargs
        return str(self.headers.get("kwargsrepr") or "")

    @property
    def _failure(self) -> Step | None:
        return None if self.history is None else self.history.failure

    @property
    def eta(self) -> datetime | None:
        """When it is due, in UTC."""
        return None if self.due_ms is None else from_ms(self.due_ms)

    @property
    def first_eta(self) -> datetime | None:
        """The due time that the sender requested, in UTC, if a policy has changed it."""
        first_ms = Wait.in_message(self.message).first_due_ms
        return None if first_ms is None else from_ms(first_ms - clock.ahead_ms)

    @property
    def remaining(self) -> timedelta | None:
        """Time until it is due, by this machine's clock. Negative if it is overdue."""
        return self.eta - datetime.now(timezone.utc) if self.eta else None

    @property
    def deliveries(self) -> int:
        """How many earlier deliveries failed."""
        if self.counted is not None:
            return self.counted
        found = _DELIVERIES.search(self.message)
        return int(found[1]) if found else 0

    @property
    def tenant(self) -> str | None:
        """The header `tenant`."""
        if not self.message and self.history is not None:
            return self.history.tenant
        found = self.headers.get("tenant")
        return None if found is None else str(found)

    def as_dict(self) -> dict[str, Any]:
        """All fields except the message, in JSON types."""
        history = self.history
        started, ended = (history.started, history.ended) if history else (None, None)
        return {
            "id": self.id,
            "state": self.state,
            "task": self.task,
            "args": self.args,
            "kwargs": self.kwargs,
            "queue": self.queue,
            "priority": self.priority,
            "eta": self.eta.isoformat() if self.eta else None,
            "first_eta": self.first_eta.isoformat() if self.first_eta else None,
            "remaining_seconds": self.remaining.total_seconds() if self.remaining else None,
            "deliveries": self.deliveries,
            "consumer": self.consumer,
            "reason": self.reason,
            "started": started.isoformat() if started else None,
            "ended": ended.isoformat() if ended else None,
            "run_seconds": history.run_seconds if history else None,
            "group_id": self.headers.get("group"),
            "root_id": self.headers.get("root_id"),
            "parent_id": self.headers.get("parent_id"),
            "retries": self.headers.get("retries"),
            "expires": self.headers.get("expires"),
            "tenant": self.tenant,
        }


def task_in(message: bytes) -> str:
    """The name of the task in the text of a message; empty for a message that is not a task."""
    found = _TASK.search(message)
    if found is None:
        return ""
    if b"\\" not in found[1]:
        return str(found[1], errors="replace")
    try:
        return str(json.loads(b'"' + found[1] + b'"'))
    except ValueError:
        return str(found[1], errors="replace")
