"""A delivered message as policies see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from celery import Celery

from kombu_delayed.consumer.policy.decisions import Arrival
from kombu_delayed.inspection.gate_usage import Holder, holders, slots_in_use
from kombu_delayed.message.ticket import slots_in
from kombu_delayed.store.calls.shards import queue_of

from ..tasks.body import read_body
from ..tasks.task_info import TaskInfo


class Message:
    """A delivered message that has not started. Times are ms by the server's clock."""

    def __init__(self, arrival: Arrival, app: Celery, limit_uses: Sequence[Any] = ()) -> None:
        #: Its own `LimitUse` policies.
        self.limit_uses = limit_uses
        self._arrival = arrival
        self._app = app
        self._envelope = arrival.envelope

    @property
    def id(self) -> str:
        """The task id."""
        return self._envelope.id

    @property
    def queue(self) -> str:
        """The queue that it came from."""
        return queue_of(self._arrival.queue)

    @property
    def headers(self) -> Mapping[str, Any]:
        """The task's headers."""
        headers: Mapping[str, Any] = self._envelope.payload["headers"]
        return headers

    @property
    def properties(self) -> Mapping[str, Any]:
        """Kombu's properties of the message."""
        properties: Mapping[str, Any] = self._envelope.payload["properties"]
        return properties

    @property
    def task(self) -> str:
        """The name of the task; empty for a message that is not a task."""
        return str(self.headers.get("task") or "")

    @property
    def tenant(self) -> str | None:
        """The header `tenant`."""
        return self.info.tenant

    @cached_property
    def info(self) -> TaskInfo:
        """The message as `app.delayed` shows it."""
        arrival = self._arrival
        return TaskInfo(
            "unacked",
            self.queue,
            arrival.record[0] - 48,
            arrival.record[1:],
            self._envelope.due_ms,
            reason=self._envelope.wait.reason,
        )

    @cached_property
    def _body(self) -> tuple[Any, Any]:
        body = read_body(self._app, self.info)
        return (body[0], body[1]) if body else ((), {})

    @property
    def args(self) -> Sequence[Any]:
        """The positional arguments; empty if this process cannot read them."""
        return self._body[0]

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """The keyword arguments; empty if this process cannot read them."""
        return self._body[1]

    @property
    def now_ms(self) -> int:
        """The current time by the server's clock."""
        return self._arrival.now_ms

    @property
    def due_ms(self) -> int | None:
        """The due time that the sender requested. None: it had no delay, so none was recorded."""
        return self._arrival.first_due_ms

    @property
    def late_ms(self) -> int:
        """How long ago it was due; 0 if that is unknown."""
        return max(self.now_ms - self.due_ms, 0) if self.due_ms is not None else 0

    @property
    def overdue_ms(self) -> int:
        """Like `late_ms`, but after a pause of its queue it counts from the end of the pause."""
        arrival = self._arrival
        return min(self.late_ms, max(arrival.server_ms - arrival.resumed_ms, 0))

    def note_latest(self, key: str, due_ms: int) -> int:
        """Record a due time of a key. Returns the latest one recorded in thirty days."""
        return int(self._arrival.store.ask("latest", self.queue, key=key, due_ms=due_ms))

    def running(self) -> Mapping[str, int]:
        """The slots of its queue that are in use, by limit and key."""
        return slots_in_use(self._arrival.store, self.queue)

    def holders(self, limit: int) -> Sequence[Holder]:
        """At most this number of messages that hold slots."""
        return holders(self._arrival.store, self.queue, limit)

    def own_slots(self) -> Mapping[str, int]:
        """The slots in `running` that are its own."""
        return slots_in(self._arrival.record)

    @property
    def app(self) -> Celery:
        """The app that has the task."""
        return self._app

    @property
    def deliveries(self) -> int:
        """How often it was delivered in vain before."""
        return self._envelope.deliveries

    @property
    def reason(self) -> str:
        """The reason for its last delay by a policy."""
        return self._envelope.wait.reason

    @property
    def marks(self) -> Sequence[str]:
        """The marks of earlier delays."""
        return self._envelope.wait.marks
