"""`app.control`, whose revoke takes tasks out of the backlog and is remembered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from celery.app.control import Control as CeleryControl
from celery.utils.log import get_logger
from kombu.utils.functional import maybe_list

from ...control.changes.revoked import BY_ID, Arguments, ids_in, revoke
from ...control.delayed import Delayed
from ...errors import BrokerError
from ...tasks.query import Query, as_in_json, longest_plain
from ...tasks.task_info import TaskInfo

logger = get_logger(__name__)


class Control(CeleryControl):
    """Celery's own, extended. A revoke that is addressed to some workers affects only these.

    It checks all broadcasts, so that `celery control revoke` works as well.
    """

    def broadcast(
        self,
        command: str,
        arguments: Arguments | None = None,
        destination: Any = None,
        *args: Any,
        **options: Any,
    ) -> Any:
        """Send a control command to the workers, and apply it to the backlog."""
        # Workers first: a task that is delivered in between is refused.
        reply = super().broadcast(command, arguments, destination, *args, **options)
        to_all = destination is None and options.get("pattern") is None
        if to_all and (dropped := _DROPS.get(command)) is not None:
            try:
                dropped(self._delayed, arguments or {})
            except BrokerError:
                logger.debug("This broker has no backlog to take tasks out of")
        return reply

    def revoke(self, task_id: str | Iterable[str], *args: Any, **options: Any) -> Any:
        """Tell workers to skip a task, or tasks, and drop those that are delayed."""
        ids = task_id if isinstance(task_id, str) else [*task_id]
        return super().revoke(ids, *args, **options)

    @cached_property
    def _delayed(self) -> Delayed:
        found = getattr(self.app, "delayed", None)
        return found if isinstance(found, Delayed) else Delayed(self.app)


@dataclass(frozen=True)
class StampQuery(Query):
    """Delayed tasks that were stamped under `stamp` with one of `values`."""

    stamp: str = ""
    values: frozenset[str] = frozenset()

    @property
    def needle(self) -> str:
        """Text that every matching message contains."""
        values = as_in_json(self.values) if len(self.values) == 1 else ()
        return longest_plain([self.stamp, *values])

    def matches(self, info: TaskInfo) -> bool:
        """Returns whether a task has one of the stamps."""
        stamps = info.headers.get("stamps")
        found = stamps.get(self.stamp) if isinstance(stamps, dict) else None
        return not self.values.isdisjoint(_texts(found))


def _texts(values: Any) -> frozenset[str]:
    return frozenset(str(each) for each in maybe_list(values) or ())


def _drop_ids(delayed: Delayed, arguments: Arguments) -> None:
    revoke(delayed, ids_in(arguments))


def _drop_stamped(delayed: Delayed, arguments: Arguments) -> None:
    headers = arguments.get("headers") or {}
    if not isinstance(headers, Mapping):
        headers = dict(each.split("=")[:2] for each in headers)  # as the command line gives them
    for stamp, values in headers.items():
        delayed.cancel_many(StampQuery(stamp=stamp, values=_texts(values)))


_DROPS: dict[str, Callable[[Delayed, Arguments], None]] = {
    **dict.fromkeys(BY_ID, _drop_ids),
    "revoke_by_stamped_headers": _drop_stamped,
}
