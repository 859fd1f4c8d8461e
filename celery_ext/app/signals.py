"""Signals about delayed tasks, sent in the process that acts.

`task_cancelled` has the argument `info`, the TaskInfo of the removed task; `task_rescheduled` has
`task_id` and `eta` (ISO 8601, None: now). Their sender is the app.

`task_scheduled` is sent for a message with a future ETA, with `task_id`, `task`, `eta` (ISO 8601)
and `routing_key`. Its sender is the name of the task, as for Celery's own signals. The same is true
for the next two.

`task_late` is sent in a worker that gets a task later after its ETA than `celery_ext.install`
allows, with `task_id`, `eta` (ISO 8601) and `late_seconds`, by this machine's clock. `task_buried`
is sent in the process that made a message a dead letter, from a separate thread, with `info`, the
TaskInfo of the dead letter.

The signals of expectations have the app as sender, and `key`, `tenant` and `id`: `answer_expected`
in the process that expects, with its `state`; `answer_given` in the process that answers, with its
`outcome`; `expectation_ended` in the worker that sent the follow-up, with the final `state`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from celery.signals import after_task_publish
from celery.utils.dispatch import Signal
from celery.utils.log import get_logger

from kombu_delayed.message.envelope import eta_to_ms
from kombu_delayed.store.calls import instrumentation
from kombu_delayed.store.calls.shards import queue_of
from kombu_delayed.store.store import Store

from ..errors import BROKER_FAILS
from ..tasks.dead_task import DeadTask
from .unique_outcomes import was_pushed

__all__ = [
    "answer_expected",
    "answer_given",
    "expectation_ended",
    "task_buried",
    "task_cancelled",
    "task_late",
    "task_rescheduled",
    "task_scheduled",
]


class _Scheduled(Signal):
    """Listens to Celery's signal only once it has had a receiver itself.

    Celery locks a signal with receivers whenever it is sent. A signal handler that sends a task
    would wait forever for the lock of the call that it has interrupted.
    """

    is_watching = False
    has_had_receivers = False

    def connect(self, *args: Any, **options: Any) -> Any:
        self.has_had_receivers = True
        self.listen()
        return super().connect(*args, **options)

    def listen(self) -> None:
        """Connect to Celery's signal in an app with the extension, once there were receivers."""
        if self.is_watching and self.has_had_receivers:
            after_task_publish.connect(_on_publish, weak=False, dispatch_uid=_UID)


task_cancelled = Signal(name="task_cancelled", providing_args={"info"})
task_rescheduled = Signal(name="task_rescheduled", providing_args={"task_id", "eta"})
task_scheduled = _Scheduled(
    name="task_scheduled", providing_args={"task_id", "task", "eta", "routing_key"}
)
task_late = Signal(name="task_late", providing_args={"task_id", "eta", "late_seconds"})
task_buried = Signal(name="task_buried", providing_args={"info"})

answer_expected = Signal(name="answer_expected", providing_args={"key", "tenant", "id", "state"})
answer_given = Signal(name="answer_given", providing_args={"key", "tenant", "id", "outcome"})
expectation_ended = Signal(
    name="expectation_ended", providing_args={"key", "tenant", "id", "state"}
)

logger = get_logger(__name__)

_UID = f"{__name__}.task_scheduled"


def others_listen(signal: Signal) -> bool:
    """Returns whether a signal has receivers other than the one of this module."""
    return any(lookup[0] != _UID for lookup, _ in signal.receivers)


def watch_publishing() -> None:
    """Send `task_scheduled` in this process from now on. Safe to call twice."""
    task_scheduled.is_watching = True
    task_scheduled.listen()


def watch_burials() -> None:
    """Send `task_buried` in this process from now on. Safe to call twice."""
    if _on_burial not in instrumentation.burial_listeners:
        instrumentation.burial_listeners.append(_on_burial)


def _on_burial(store: Store, queue: str, ids: list[str]) -> None:
    if not task_buried.receivers:
        return
    try:
        letters = store.dead.letters(queue, ids)
    except BROKER_FAILS as error:
        logger.warning("Cannot send task_buried for dead letters in queue %r: %s", queue, error)
        return
    for letter in letters:
        info = DeadTask(queue_of(queue), letter).info
        task_buried.send(sender=info.task, info=info)


def _on_publish(
    sender: str, headers: Mapping[str, Any], routing_key: str = "", **kwargs: Any
) -> None:
    eta = headers.get("eta")
    if eta is None or not task_scheduled.receivers or was_pushed(str(headers.get("id"))):
        return
    if _is_ahead(eta):
        task_scheduled.send(
            sender=sender,
            task_id=headers.get("id"),
            task=sender,
            eta=eta,
            routing_key=routing_key,
        )


def _is_ahead(eta: Any) -> bool:
    try:
        return eta_to_ms(eta) > time.time() * 1000
    except (ValueError, TypeError, OverflowError):
        return False  # sent without a delay, with a warning
