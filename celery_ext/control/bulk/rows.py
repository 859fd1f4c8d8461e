"""A row of bulk scheduling: a task, its arguments and its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from celery import Celery
from celery.app.task import Task
from celery.canvas import Signature

from kombu_delayed.message.envelope import eta_to_ms

from ...errors import QueryError
from ...tasks.times import from_now_ms

#: Options that are the same in every message that is filled in from one template.
_PLAIN = frozenset(
    {
        *("delivery_mode", "ignore_result", "priority", "queue", "reply_to", "retries"),
        *("routing_key", "serializer", "shadow", "soft_time_limit", "time_limit"),
    }
)

#: Options that a template has gaps for.
_FILLED = frozenset(
    {
        *("countdown", "eta", "group_id", "group_index", "headers", "parent_id", "root_id"),
        "task_id",
    }
)

_PLAIN_TYPES = frozenset({str, int, float, bool, type(None)})
_LENGTH = 5
_MISSING = (None,) * _LENGTH


class RowError(ValueError):
    """This row is invalid."""


class Call(NamedTuple):
    """A task or its name, its arguments and its options. An ETA is among the options."""

    task: Any
    args: Any
    kwargs: Any
    options: Mapping[str, Any]

    @property
    def kind(self) -> Any:
        """The common part of calls whose messages differ only in gaps; None for other calls."""
        options, plain = self.options, []
        for name, value in options.items():
            if name not in _FILLED:
                if name not in _PLAIN or type(value) not in _PLAIN_TYPES:
                    return None
                plain.append((name, type(value).__name__, value))
        plain.sort()
        inherits = not options.get("root_id"), not options.get("parent_id")
        return self.task, tuple(plain), inherits


@dataclass(frozen=True, eq=False, slots=True)
class Pattern:
    """The common part of calls that differ only in their ids, arguments and times.

    `options` are as for a Call, but only such that `Call.kind` includes.
    """

    task: Any
    options: Mapping[str, Any]


class Timed(NamedTuple):
    """A call by a pattern: faster than a Call if many calls share the pattern.

    `eta` is ISO 8601 in UTC, as `datetime.isoformat` writes it; `due` is the same time in
    milliseconds since the epoch, rounded up.
    """

    pattern: Pattern
    id: str
    args: list[Any]
    kwargs: dict[str, Any]
    eta: str
    due: str

    @property
    def call(self) -> Call:
        """The same call as a Call."""
        pattern, eta = self.pattern, datetime.fromisoformat(self.eta)
        options = {**pattern.options, "task_id": self.id, "eta": eta}
        return Call(pattern.task, self.args, self.kwargs, options)


def call_of(app: Celery, row: Any) -> Call:
    """Read a row that is not a canvas. Raises RowError."""
    if isinstance(row, (tuple, list)) and 0 < len(row) <= _LENGTH:
        task, args, kwargs, eta, options = tuple(row) + _MISSING[len(row) :]
        call = Call(_task(app, task), args, kwargs, _options(options, eta))
    elif isinstance(row, Signature):
        refuse_others(app, row._app)
        task = app.tasks.get(row["task"]) or row["task"]
        call = Call(task, row["args"], row["kwargs"], row["options"])
    else:
        raise RowError(
            "a row is a signature or (task, args, kwargs, eta, options), not "
            f"{type(row).__name__}: {row!r}"[:200]
        )
    check_time(call.options)
    return call


def refuse_others(app: Celery, other: Celery | None) -> None:
    """Raises RowError for a signature of another app."""
    if other is not None and other != app:
        raise RowError(f"the signature belongs to another app, {other!r}")


def _task(app: Celery, task: Any) -> Any:
    if type(task) is str and task:
        return task
    if not isinstance(task, Task):
        raise RowError(f"a task is a task of the app or a name, not {task!r}"[:200])
    if task.app != app:
        raise RowError(f"task {task.name} belongs to another app, {task.app!r}")
    return task


def _options(options: Any, eta: Any) -> Mapping[str, Any]:
    if options is None:
        options = {}
    elif type(options) is not dict and not isinstance(options, Mapping):
        raise RowError(f"options are a mapping, not {type(options).__name__}: {options!r}"[:200])
    return options if eta is None else {**options, "eta": eta}


def check_time(options: Mapping[str, Any]) -> None:
    """Raises RowError for an invalid time, which would let the task run at once."""
    eta, countdown = options.get("eta"), options.get("countdown")
    if eta is not None and type(eta) is not datetime:
        try:
            eta_to_ms(eta)
        except (ValueError, TypeError, OverflowError) as error:
            raise RowError(f"eta takes a datetime or ISO 8601, not {eta!r}"[:200]) from error
    if countdown is not None:
        if not isinstance(countdown, (int, float)) or isinstance(countdown, bool):
            raise RowError(f"countdown takes a number of seconds, not {countdown!r}"[:200])
        try:
            from_now_ms("countdown", countdown)
        except QueryError as error:
            raise RowError(str(error)[:200]) from error
