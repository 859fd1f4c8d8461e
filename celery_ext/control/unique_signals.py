"""Tasks whose place, or whose due time, others with the same unique key have taken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from kombu_delayed.inspection.backlog import Waiting
from kombu_delayed.message.envelope import open_kept

from ..app.signals import task_rescheduled
from ..app.unique_outcomes import Sent, hearing
from ..tasks.task_info import TaskInfo
from ..tasks.times import from_ms

if TYPE_CHECKING:
    from .delayed import Delayed

#: Who is sending in this context.
_sender: ContextVar[Delayed | None] = ContextVar("sender", default=None)


def watch_sending(delayed: Delayed) -> None:
    """Tell of tasks that the app's own displace; call it once for an app.

    Whatever an app sends, it sends with a producer that it asks this method for.
    """
    app = delayed.app
    acquire = app.producer_or_acquire

    @contextmanager
    def producer_or_acquire(producer: Any = None) -> Iterator[Any]:
        if _sender.get() is delayed:  # a part of a canvas
            with acquire(producer) as found:
                yield found
            return
        token, displaced = _sender.set(delayed), []
        try:
            with hearing() as displaced, acquire(producer) as found:
                yield found
        finally:
            # Not before the producer is free again: a result backend may want one.
            _sender.reset(token)
            for sent in displaced:
                _tell(delayed, sent)

    app.producer_or_acquire = producer_or_acquire


def _tell(delayed: Delayed, sent: Sent) -> None:
    queue, id, outcome = sent
    waiting = outcome.other.partition("\x1f")[0]
    if outcome.done == "pushed":
        eta = from_ms(outcome.due_ms).isoformat() if outcome.due_ms else None
        task_rescheduled.send(sender=delayed.app, task_id=waiting, eta=eta)
    elif outcome.done == "replaced" and waiting != id:  # else the id is that of one that waits
        kept = open_kept(outcome.replaced)
        delayed.was_cancelled(TaskInfo.waiting(queue, Waiting(outcome.other, kept)))
