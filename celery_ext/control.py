"""`app.control`, whose revoke also takes tasks out of the backlog."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

from celery.app.control import Control as CeleryControl

from .delayed import Delayed


class Control(CeleryControl):
    """Celery's own; a revoke addressed to some workers only is theirs alone."""

    @cached_property
    def _delayed(self) -> Delayed:
        return Delayed(self.app)

    def revoke(self, task_id: str | Iterable[str], destination: Any = None, **options: Any) -> Any:
        """Tell workers to skip a task, or tasks, and drop those that are delayed."""
        ids = [task_id] if isinstance(task_id, str) else [*task_id]
        # Workers first: a task that is delivered in between is refused.
        reply = super().revoke(task_id if isinstance(task_id, str) else ids, destination, **options)
        if destination is None:
            for id in ids:
                self._delayed.cancel(id)
        return reply

    def revoke_by_stamped_headers(
        self, headers: dict[str, Any], destination: Any = None, **options: Any
    ) -> Any:
        """Tell workers to skip tasks with any of these stamps, and drop those that are delayed."""
        reply = super().revoke_by_stamped_headers(headers, destination, **options)
        if destination is None:
            for name, values in headers.items():
                self._drop_stamped(name, values)
        return reply

    def _drop_stamped(self, name: str, values: Any) -> None:
        wanted = {values} if isinstance(values, str) else {*map(str, values)}
        for info in self._delayed.find():
            stamps = info.headers.get("stamps")
            found = stamps.get(name) if isinstance(stamps, dict) else None
            given = {found} if isinstance(found, str) else {*map(str, found or ())}
            if given & wanted:
                self._delayed.cancel(info.id, info.queue)
