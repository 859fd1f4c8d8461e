"""Changes the priority, arguments, headers or due time of a task while it waits."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from functools import partial
from itertools import chain
from typing import Any

from celery import Celery
from kombu import compression, serialization
from kombu.exceptions import EncodeError

from kombu_delayed.inspection.backlog import Waiting
from kombu_delayed.inspection.gate_usage import server_ms
from kombu_delayed.message.envelope import to_json
from kombu_delayed.message.wait import NO_WAIT, Wait

from ...app import signals
from ...app.queues import Queues, despite_nodes_down
from ...errors import QueryError
from ...tasks.body import CELERY_HEADERS, payload_of, read_body
from ...tasks.short_repr import short_repr
from ...tasks.task_info import TaskInfo
from ...tasks.times import LATEST_MS, from_ms, from_now_ms, to_ms
from ..bulk.message_template import repr_limits
from .ready import ReadyTask, amend, ready_tasks

#: How often a message is read again because another program has changed it meanwhile.
TRIES = 20


@dataclass(frozen=True)
class Change:
    """The new values; None leaves a value unchanged. Raises QueryError for invalid values."""

    countdown: float | None = None
    eta: datetime | str | None = None
    priority: int | None = None
    args: Sequence[Any] | None = None
    kwargs: Mapping[str, Any] | None = None
    headers: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if all(getattr(self, each.name) is None for each in fields(self)):
            names = ", ".join(each.name for each in fields(self))
            raise QueryError(f"change takes at least one of {names}")
        if self.countdown is not None and self.eta is not None:
            raise QueryError("change takes either countdown (seconds) or eta (a time)")
        if self.priority is not None and type(self.priority) is not int:
            raise QueryError(f"priority={self.priority!r} is not a whole number")
        if isinstance(self.args, (str, bytes)) or not isinstance(self.args, (Sequence, type(None))):
            raise QueryError(f"args takes a list of arguments, not {self.args!r}"[:200])
        if not isinstance(self.kwargs, (Mapping, type(None))):
            raise QueryError(f"kwargs takes a dict of arguments, not {self.kwargs!r}"[:200])
        if not isinstance(self.headers, (Mapping, type(None))):
            raise QueryError(f"headers takes a dict of headers, not {self.headers!r}"[:200])
        if "id" in (self.headers or {}):
            raise QueryError("headers cannot change the id of a task: cancel it, and send another")
        try:
            to_json(self.headers)
        except (TypeError, ValueError) as error:
            raise QueryError(f"headers takes values that JSON has: {error}") from error

    def due_ms(self) -> int | None:
        """The new due time in ms since the epoch, or None to leave it unchanged."""
        if self.eta is not None:
            return min(max(to_ms("eta", self.eta), 0), LATEST_MS)
        if self.countdown is not None:
            return min(max(from_now_ms("countdown", self.countdown), 0), LATEST_MS)
        return None


@despite_nodes_down
def change(
    delayed: Queues,
    task_id: str,
    change: Change,
    queue: str | None,
    accepts: Callable[[TaskInfo], bool],
) -> bool:
    """Change a delayed or ready task for which `accepts` is true. True if there was one.

    Raises QueryError if its arguments cannot be read or written here.
    """
    changing, changed = _Changing(delayed, change, change.due_ms(), accepts), False
    names = chain.from_iterable(delayed.where(queue, [task_id], found := set[str]()))
    for name in names:
        for member in [waiting.member for waiting in delayed.backlog(name).get(task_id)]:
            if changing.revise(name, task_id, member):
                found.add(task_id)
                changed = True
    if not changed:
        for task in ready_tasks(delayed, [task_id], queue):
            changed = changing.amend(task) or changed
    if changed and changing.due_ms is not None:
        eta = from_ms(changing.due_ms).isoformat()
        signals.task_rescheduled.send(sender=delayed.app, task_id=task_id, eta=eta)
    return changed


@dataclass(frozen=True)
class _Changing:
    """Changes the messages of a task for which `accepts` is true."""

    delayed: Queues
    change: Change
    due_ms: int | None
    accepts: Callable[[TaskInfo], bool]

    def revise(self, name: str, task_id: str, member: str) -> bool:
        backlog = self.delayed.backlog(name)
        for _ in range(TRIES):
            waiting = next((each for each in backlog.get(task_id) if each.member == member), None)
            if waiting is None or not self.accepts(info := TaskInfo.waiting(name, waiting)):
                return False
            payload = payload_of(info)
            payload.pop("wait", None)
            self._rewrite(info, payload)
            text, at_ms = to_json(payload), self.due_ms
            if at_ms is None:
                text, at_ms = _as_it_waits(text, waiting), waiting.kept.due_ms
            step = self._step(payload)
            step = waiting.kept.step if step is None else step
            if backlog.revise(waiting, step, text.encode(), at_ms):
                return True
        raise QueryError(
            f"task {task_id} was not changed: other programs keep changing it; try again"
        )

    def amend(self, task: ReadyTask) -> bool:
        if not self.accepts(task.info):
            return False
        step = self._step({"properties": {"priority": self.change.priority}})
        due_ms = self.due_ms
        if due_ms is not None and due_ms <= server_ms(self.delayed.store, task.shard):
            due_ms = None
        return amend(task, partial(self._rewrite, task.info), step=step, due_ms=due_ms)

    def _step(self, payload: dict[str, Any]) -> int | None:
        """The step of its new priority, or None to leave it unchanged."""
        if self.change.priority is None:
            return None
        channel = self.delayed.connection.default_channel
        step: int = channel.priority(channel._get_message_priority(payload, reverse=False))
        return step

    def _rewrite(self, info: TaskInfo, payload: dict[str, Any]) -> None:
        payload.pop("ticket", None)  # it lists its turn and limits, which may change
        headers, properties = payload["headers"], payload["properties"]
        if self.change.priority is not None:
            properties["priority"] = self.change.priority
        if self.due_ms is not None and isinstance(headers.get("eta"), str):
            headers["eta"] = from_ms(self.due_ms).isoformat()
        for name, value in (self.change.headers or {}).items():
            if value is None and name not in CELERY_HEADERS:
                headers.pop(name, None)
            else:
                headers[name] = value
        if self.change.args is not None or self.change.kwargs is not None:
            _write_arguments(self.delayed.app, info, payload, self.change)


def _as_it_waits(text: str, waiting: Waiting) -> str:
    """A changed message with an unchanged due time, which keeps its wait."""
    wait = Wait.in_message(waiting.kept.message)
    return text if wait is NO_WAIT else wait.put_into(text)


def _write_arguments(app: Celery, info: TaskInfo, payload: dict[str, Any], change: Change) -> None:
    body = read_body(app, info)
    serializer = serialization.registry.type_to_name.get(payload.get("content-type"))
    if body is None or serializer is None:
        raise QueryError(
            f"the arguments of task {info.id} cannot be read here (content type "
            f"{payload.get('content-type')!r}): they stay as they are"
        )
    args = list(body[0] if change.args is None else change.args)
    kwargs = dict(body[1] if change.kwargs is None else change.kwargs)
    headers = payload["headers"]
    try:
        _, _, written = serialization.dumps((args, kwargs, body[2]), serializer=serializer)
    except EncodeError as error:
        raise QueryError(f"the arguments of task {info.id} cannot be written: {error}") from error
    if method := headers.get("compression"):
        written, _ = compression.compress(written, method)
    raw = written.encode() if isinstance(written, str) else written
    encoded = payload["properties"].get("body_encoding") == "base64"
    payload["body"] = b64encode(raw).decode() if encoded else raw.decode()
    limits = repr_limits(app)
    headers["argsrepr"] = short_repr(tuple(args), *limits[0])
    headers["kwargsrepr"] = short_repr(kwargs, *limits[1])
