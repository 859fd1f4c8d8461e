"""Tasks of which only one is delayed at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from celery import Task
from kombu.utils.json import dumps

from kombu_delayed.errors import AlreadyDelayed
from kombu_delayed.message.envelope import CONFLICTS

__all__ = ["CONFLICTS", "AlreadyDelayed", "UniqueTask", "unique_headers"]


def unique_headers(key: str, conflict: str = "refuse") -> dict[str, str]:
    """Headers for `apply_async` that keep a second task from waiting beside a first with this key.

    While the first is delayed in the queue, the second is refused with AlreadyDelayed ("refuse"),
    takes its place ("replace"), or pushes its due time ("debounce"). Raises ValueError for another
    conflict.
    """
    if conflict not in CONFLICTS:
        raise ValueError(f"conflict takes one of {', '.join(CONFLICTS)}, not {conflict!r}")
    return {"delayed_unique": key, "delayed_conflict": conflict}


class UniqueTask(Task):
    """A base class: `@app.task(base=UniqueTask, unique_conflict="replace")`.

    Two calls are the same if `unique_key` says so: by default, with the same task and arguments.
    """

    abstract = True
    unique_conflict = "refuse"

    def unique_key(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """What two calls that must not both be delayed have in common."""
        text = dumps([list(args), dict(kwargs)], sort_keys=True)
        return f"{self.name}:{hashlib.sha256(text.encode()).hexdigest()[:32]}"

    def apply_async(self, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        """As of any task. Raises AlreadyDelayed where a second one is refused."""
        headers = unique_headers(self.unique_key(args or (), kwargs or {}), self.unique_conflict)
        options["headers"] = {**headers, **(options.get("headers") or {})}
        return super().apply_async(args, kwargs, *more, **options)
