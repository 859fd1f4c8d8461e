"""Selects waiting tasks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from fnmatch import translate
from functools import cached_property
from typing import Any

from kombu_delayed.inspection.backlog import NEVER_MS

from ..errors import QueryError
from .arguments import Condition, conditions
from .task_info import TaskInfo
from .times import to_ms

#: The states that a query can select. The first one is the default.
STATES = "delayed", "ready"

#: Text that every JSON encoder writes unchanged.
_PLAIN = re.compile(r"[A-Za-z0-9 _.,:;@+=-]+")

#: Texts of header values whose JSON may be different: `True` is `true` there.
_OTHER_IN_JSON = re.compile(r"True|False|None|-?inf|nan|[\[{(].*", re.DOTALL)


@dataclass(frozen=True)
class Query:
    """Selects delayed tasks that match all criteria. Without criteria it selects all of them.

    With `state="ready"` it selects ready tasks instead.

    `task` is a name with `*` for any text, `?` for any character and `[…]` for one of several.
    Times are datetimes or ISO 8601 (UTC without a zone); `due_after` is included and `due_before`
    is not. `header` compares headers, as text where the types differ. `group_id` is the id of a
    group, and `root_id` that of the first task of a canvas. `where` has conditions on arguments,
    such as `"args.customer_id == 7"`: each message is read for it. Raises QueryError for an invalid
    value.
    """

    task: str | None = None
    queue: str | None = None
    tenant: str | None = None
    due_before: datetime | str | None = None
    due_after: datetime | str | None = None
    header: Mapping[str, Any] = field(default_factory=dict)
    group_id: str | None = None
    root_id: str | None = None
    state: str | None = None
    where: str | None = None

    def __post_init__(self) -> None:
        for name in ("task", "queue", "tenant", "group_id", "root_id"):
            check_text(name, getattr(self, name))
        if self.state not in (None, *STATES):
            raise QueryError(f"state={self.state!r} is not one of {', '.join(STATES)}")
        if not isinstance(self.header, Mapping):
            raise QueryError(f"header takes a dict of headers, not {self.header!r}")
        if self.where is not None:
            conditions(self.where)
        if self.due_after_ms > self.due_before_ms:
            after, before = (
                each.isoformat(timespec="seconds") if isinstance(each, datetime) else each
                for each in (self.due_after, self.due_before)
            )
            raise QueryError(
                f"due_after={after} is later than due_before={before}: no task can match"
            )

    @property
    def is_empty(self) -> bool:
        """Returns whether it selects everything."""
        return all(not getattr(self, each.name) for each in fields(self))

    @property
    def due_after_ms(self) -> int:
        return 0 if self.due_after is None else to_ms("due_after", self.due_after)

    @property
    def due_before_ms(self) -> int:
        return NEVER_MS if self.due_before is None else to_ms("due_before", self.due_before)

    @property
    def weight(self) -> int:
        """The relative cost of matching a message, which is higher if arguments are decoded."""
        return 1 if self.where is None else 5

    @property
    def needle(self) -> str:
        """Text that every matching message contains, so that the server can search for it first."""
        values = [value for value in self._headers.values() if isinstance(value, str)]
        texts = as_in_json(values)
        if self.task:
            texts += re.split(r"[*?]", self.task.partition("[")[0])
        return longest_plain(texts)

    @cached_property
    def _headers(self) -> dict[str, Any]:
        named = {"tenant": self.tenant, "group": self.group_id, "root_id": self.root_id}
        return {**self.header, **{name: value for name, value in named.items() if value}}

    @cached_property
    def _task_pattern(self) -> re.Pattern[str] | None:
        return re.compile(translate(self.task)) if self.task else None

    @cached_property
    def _conditions(self) -> tuple[Condition, ...]:
        return () if self.where is None else conditions(self.where)

    def matches(self, info: TaskInfo) -> bool:
        """Returns whether a task matches. Its queue and due time have already been checked."""
        if self._task_pattern is not None and not self._task_pattern.match(info.task):
            return False
        headers = info.headers if self._headers else {}
        if not all(
            name in headers and (headers[name] == value or str(headers[name]) == str(value))
            for name, value in self._headers.items()
        ):
            return False
        if not self._conditions:
            return True
        arguments = info.arguments
        return arguments is not None and all(each.is_true(arguments) for each in self._conditions)


def check_text(name: str, value: Any) -> None:
    """Raises QueryError for a criterion that is not text: an empty variable must not select all."""
    if value is not None and not (isinstance(value, str) and value):
        raise QueryError(f"{name}={value!r} is not text: to select all, leave it out")


def query_of(query: Query | None, criteria: Mapping[str, Any]) -> Query:
    """A query with some of its criteria replaced. Raises QueryError if it is not a query."""
    if query is None:
        return Query(**criteria)
    selects_ready(query)
    return replace(query, **criteria)


def selects_ready(query: Query) -> bool:
    """Returns whether it selects ready tasks. Raises QueryError if it is not a query."""
    if not isinstance(query, Query):
        raise QueryError(
            f"{query!r} is not a query: give one such as celery_ext.Query(task='shop.*')"
        )
    return query.state == "ready"


def ids_of(given: str | Iterable[str]) -> list[str]:
    """The ids of one task or of several, once each. Raises QueryError for an invalid id."""
    ids = [given] if isinstance(given, str) or not isinstance(given, Iterable) else [*given]
    for id in ids:
        if not isinstance(id, str):
            raise QueryError(f"{id!r} is not the id of a task: give text, such as result.id")
    return [*dict.fromkeys(ids)]


def as_in_json(texts: Iterable[str]) -> list[str]:
    """Those of the texts of values that JSON may not write in another way."""
    return [text for text in texts if not _OTHER_IN_JSON.fullmatch(text)]


def longest_plain(texts: list[str]) -> str:
    """The longest part of any of these texts that JSON writes unchanged."""
    plain = [found for text in texts for found in _PLAIN.findall(text)]
    return max(plain, key=len, default="")
