"""Which delayed tasks are meant."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone
from fnmatch import translate
from functools import cached_property
from typing import Any

from kombu_delayed.backlog import NEVER_MS
from kombu_delayed.message import eta_to_ms

from .errors import QueryError
from .task_info import TaskInfo

#: What JSON writes as it is.
_PLAIN = re.compile(r"[A-Za-z0-9 _.,:;@/+=-]+")


@dataclass(frozen=True)
class Query:
    """Delayed tasks that meet all of these. An empty one means all there are.

    `task` is a name with `*` and `?` for any text and any character; times are datetimes or ISO
    8601 (UTC where they name no zone), `due_after` is included and `due_before` is not; `header`
    compares headers as text; `group_id` and `root_id` are a group's, and a canvas's first task's.
    """

    task: str | None = None
    queue: str | None = None
    tenant: str | None = None
    due_before: datetime | str | None = None
    due_after: datetime | str | None = None
    header: Mapping[str, Any] = field(default_factory=dict)
    group_id: str | None = None
    root_id: str | None = None

    def __post_init__(self) -> None:
        for name in ("due_before", "due_after"):
            value = getattr(self, name)
            try:
                if value is not None:
                    eta_to_ms(value)
            except (ValueError, TypeError, OverflowError) as error:
                raise QueryError(
                    f"{name}={value!r} is not a time: give a datetime or ISO 8601, such as "
                    f"{datetime.now(timezone.utc).isoformat(timespec='seconds')}"
                ) from error

    @property
    def is_empty(self) -> bool:
        """Whether it means everything."""
        return all(not getattr(self, each.name) for each in fields(self))

    @property
    def due_after_ms(self) -> int:
        """In ms since the epoch."""
        return eta_to_ms(self.due_after) if self.due_after is not None else 0

    @property
    def due_before_ms(self) -> int:
        """In ms since the epoch."""
        return eta_to_ms(self.due_before) if self.due_before is not None else NEVER_MS

    @property
    def needle(self) -> str:
        """Text that every message has that is meant, for the server to look for first."""
        literals = [value for value in self._headers.values() if isinstance(value, str)]
        if self.task:
            literals += re.split(r"[*?\[\]]", self.task)
        plain = [found for text in literals for found in _PLAIN.findall(text)]
        return max(plain, key=len, default="")

    @cached_property
    def _headers(self) -> dict[str, Any]:
        named = {"tenant": self.tenant, "group": self.group_id, "root_id": self.root_id}
        return {**self.header, **{name: value for name, value in named.items() if value}}

    @cached_property
    def _task_pattern(self) -> re.Pattern[str] | None:
        return re.compile(translate(self.task)) if self.task else None

    def matches(self, info: TaskInfo) -> bool:
        """Whether a task of the queue and the time that are meant is meant."""
        if self._task_pattern is not None and not self._task_pattern.match(info.task):
            return False
        if not self._headers:
            return True
        headers = info.headers
        return all(
            name in headers and str(headers[name]) == str(value)
            for name, value in self._headers.items()
        )
