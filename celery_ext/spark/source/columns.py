"""The columns of the backlog, and how each is made from a page of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from celery_ext.tasks.task_info import TaskInfo
from celery_ext.tasks.times import LATEST_MS
from kombu_delayed.errors import OptionError
from kombu_delayed.message.envelope import parse_iso8601
from kombu_delayed.store.calls.shards import queue_of

from .paging import Page

#: The highest number of an int column. Messages of other programs may have more.
INT_MAX = 2**31 - 1

#: The position of a UUID's version.
_VERSION_AT = 14


@dataclass
class Rows:
    """A page of the backlog. Only the parts that columns need are parsed."""

    page: Page

    @cached_property
    def infos(self) -> list[TaskInfo]:
        """The details of each task, from its message."""
        page = self.page
        return [
            TaskInfo("delayed", page.queue, step, message)
            for step, message in zip(page.steps, page.messages, strict=True)
        ]

    @cached_property
    def ids(self) -> list[str]:
        members = [place.member for place in self.page.places]
        return [each.partition(b"\x1f")[0].decode(errors="backslashreplace") for each in members]


def _plain(text: str | None) -> str | None:
    """Replace lone surrogates, which JSON allows and Arrow does not."""
    if text is None or text.isascii():
        return text
    return text.encode(errors="backslashreplace").decode()


def _due(rows: Rows) -> list[int]:
    return [min(place.due_ms, LATEST_MS) * 1000 for place in rows.page.places]


def _made_us(id: str) -> int | None:
    """The creation time of a UUID of version 7, in µs since the epoch; None for other ids."""
    if len(id) != 36 or id[_VERSION_AT] != "7":
        return None
    try:
        return min(int(id[:8] + id[9:13], 16), LATEST_MS) * 1000
    except ValueError:
        return None


def _eta(info: TaskInfo) -> datetime | None:
    text = info.headers.get("eta")
    if not isinstance(text, str):
        return None
    try:
        eta = parse_iso8601(text)
        return (eta if eta.tzinfo else eta.replace(tzinfo=timezone.utc)).astimezone(timezone.utc)
    except (ValueError, OverflowError):
        return None


def _headers(rows: Rows) -> Any:
    """An array of maps, from flat lists: half the time of a list of pairs for each row."""
    import pyarrow

    names: list[str] = []
    values: list[str] = []
    offsets = [0]
    for info in rows.infos:
        headers = info.headers
        names += headers
        values += map(_as_json, headers.values())
        offsets.append(len(names))
    names = [_plain(name) or "" for name in names]
    return pyarrow.MapArray.from_arrays(offsets, names, values)


def _as_json(value: Any) -> str:
    if value is None:
        return "null"
    return quoted(value) if type(value) is str else json.dumps(value)


def _priority(info: TaskInfo) -> int:
    return info.priority if -INT_MAX <= info.priority <= INT_MAX else info.step


def _each(read: Callable[[TaskInfo], Any]) -> Callable[[Rows], list[Any]]:
    return lambda rows: [read(info) for info in rows.infos]


@dataclass(frozen=True)
class Column:
    """A column with its Spark type. With `needs_message` it takes more than due time and id.

    `values` makes the input of an Arrow array: one value for each row of a page.
    """

    type: str
    values: Callable[[Rows], Any]
    meaning: str
    needs_message: bool = True


COLUMNS = {
    "id": Column("string", lambda rows: rows.ids, "The task id.", False),
    "task": Column("string", _each(lambda info: _plain(info.task)), "The name of the task."),
    "queue": Column(
        "string",
        lambda rows: [queue_of(rows.page.queue)] * len(rows.page.places),
        "The queue.",
        False,
    ),
    "tenant": Column("string", _each(lambda info: _plain(info.tenant)), "The header `tenant`."),
    "priority": Column("int", _each(_priority), "The priority; a lower number is more urgent."),
    "due": Column("timestamp", _due, "The due time, by the server's clock.", False),
    "scheduled_at": Column(
        "timestamp",
        lambda rows: [*map(_made_us, rows.ids)],
        "The time in an id of UUID version 7; null for other ids.",
        False,
    ),
    "eta": Column("timestamp", _each(_eta), "The header `eta`."),
    "args_preview": Column(
        "string", _each(lambda info: _plain(info.args)), "The arguments as Celery shows them."
    ),
    "kwargs_preview": Column(
        "string",
        _each(lambda info: _plain(info.kwargs)),
        "The keyword arguments as Celery shows them.",
    ),
    "headers": Column("map<string,string>", _headers, "The headers, each as JSON."),
    "payload": Column("binary", lambda rows: rows.page.messages, "The whole message as JSON."),
    "deliveries": Column(
        "int",
        _each(lambda info: min(info.deliveries, INT_MAX)),
        "How many earlier deliveries failed.",
    ),
    "partition": Column(
        "string", lambda rows: rows.page.partitions, "The partition of the backlog.", False
    ),
    "member": Column(
        "binary",
        lambda rows: [place.member for place in rows.page.places],
        "Its name in the backlog: the id, or a longer name if several messages share the id.",
        False,
    ),
    "step": Column("int", lambda rows: rows.page.steps, "The priority step of its ready list."),
    "due_ms": Column(
        "bigint",
        lambda rows: [place.due_ms for place in rows.page.places],
        "`due` in ms since the epoch, even beyond the year 9999.",
        False,
    ),
}

#: All columns, as Spark reads them.
SCHEMA = ", ".join(f"{name} {column.type}" for name, column in COLUMNS.items())


def check_columns(types: dict[str, str]) -> None:
    """Raises OptionError for a schema with an unknown column, or one of another type."""
    for name, type_ in types.items():
        if name not in COLUMNS:
            raise OptionError(f"the backlog has no column {name!r}; it has {', '.join(COLUMNS)}")
        if type_ != COLUMNS[name].type:
            raise OptionError(
                f"column {name} of the backlog is of type {COLUMNS[name].type}, not {type_}"
            )
