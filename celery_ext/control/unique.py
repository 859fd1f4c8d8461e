"""Unique tasks: only one of them is delayed at a time, and displaced ones are reported."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from celery import Task
from kombu.utils.json import dumps

from kombu_delayed.errors import AlreadyDelayed as AlreadyDelayed
from kombu_delayed.inspection.backlog import Waiting
from kombu_delayed.message.envelope import CONFLICTS, FINISHED, UNTIL_HEADER, open_kept

from ..app.queues import Queues
from ..app.signals import task_rescheduled
from ..app.unique_outcomes import Sent, hearing
from ..tasks.task_info import TaskInfo
from ..tasks.times import from_ms

#: The sender in this context.
_sender: ContextVar[Queues | None] = ContextVar("sender", default=None)


def unique_headers(key: str, conflict: str = "refuse", until: str | None = None) -> dict[str, str]:
    """Headers for `apply_async`: only one task with this key waits at a time.

    While the first is delayed in the queue, the second is refused with AlreadyDelayed ("refuse"),
    takes its place ("replace"), or changes its due time ("debounce"). With `until="finished"` the
    first has the key until it has ended: while it is ready or runs, a second is refused. Raises
    ValueError for other values.
    """
    if until not in (None, FINISHED):
        raise ValueError(f"until takes {FINISHED!r} or None, not {until!r}")
    if conflict not in CONFLICTS:
        raise ValueError(f"conflict takes one of {', '.join(CONFLICTS)}, not {conflict!r}")
    headers = {"delayed_unique": key, "delayed_conflict": conflict}
    return {**headers, UNTIL_HEADER: until} if until else headers


class UniqueTask(Task):
    """A base class: `@app.task(base=UniqueTask, unique_conflict="replace")`.

    Two calls are the same if `unique_key` says so: by default, with the same task and arguments.
    """

    abstract = True
    unique_conflict = "refuse"
    unique_until: str | None = None

    def unique_key(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """The key of a call. Of two calls with the same key, only one can be delayed."""
        try:
            text = dumps([list(args), dict(kwargs)], sort_keys=True)
        except TypeError:  # keys of different types cannot be sorted
            text = dumps(_with_text_keys([list(args), dict(kwargs)]), sort_keys=True)
        return f"{self.name}:{hashlib.sha256(text.encode()).hexdigest()[:32]}"

    def apply_async(self, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        """Send the task, as usual. Raises AlreadyDelayed if it is refused as a second one."""
        key = self.unique_key(args or (), kwargs or {})
        headers = unique_headers(key, self.unique_conflict, self.unique_until)
        options["headers"] = {**headers, **(options.get("headers") or {})}
        return super().apply_async(args, kwargs, *more, **options)


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _with_text_keys(each) for name, each in value.items()}
    return [*map(_with_text_keys, value)] if isinstance(value, (list, tuple)) else value


def watch_sending(delayed: Queues) -> None:
    """Report the tasks that an app's unique tasks displace. Call it once for an app.

    It wraps `producer_or_acquire`, where an app gets the producer for everything that it sends.
    """
    app = delayed.app
    acquire = app.producer_or_acquire

    @contextmanager
    def producer_or_acquire(producer: Any = None) -> Iterator[Any]:
        if _sender.get() is delayed:  # a part of a canvas
            with acquire(producer) as found:
                yield found
            return
        is_inner = _sender.get() is not None  # another app sends, as in a handler of a signal
        token, displaced = _sender.set(delayed), []
        try:
            with hearing(alone=is_inner) as displaced, acquire(producer) as found:
                yield found
        finally:
            # Only after the producer is released: a result backend may need one.
            _sender.reset(token)
            for sent in displaced:
                _signal(delayed, sent)

    app.producer_or_acquire = producer_or_acquire


def _signal(delayed: Queues, sent: Sent) -> None:
    queue, id, outcome = sent
    waiting = outcome.other.partition("\x1f")[0]
    if outcome.done == "pushed":
        eta = from_ms(outcome.due_ms).isoformat() if outcome.due_ms else None
        task_rescheduled.send(sender=delayed.app, task_id=waiting, eta=eta)
    elif outcome.done == "replaced" and waiting != id:  # else a task with this id waits
        kept = open_kept(outcome.replaced)
        delayed.was_cancelled(TaskInfo.waiting(queue, Waiting(outcome.other, kept)))
