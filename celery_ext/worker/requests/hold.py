"""The remote control command that returns messages of a paused queue that have not started.

Imported in workers only: it adds a command to the remote control of this process.
"""

from __future__ import annotations

from typing import Any

from celery.worker import control

from kombu_delayed.consumer.consumer import Consumer

from ...control.policies.pauses import HOLD


@control.control_command(name=HOLD, args=[("queue", str)], signature="<queue>")
def hold(state: Any, queue: str, **kwargs: Any) -> dict[str, str]:
    """Return the messages of a paused queue that have not started."""
    channel = getattr(state.consumer.task_consumer, "channel", None)
    consumer = getattr(channel, "consumer", None)
    if isinstance(consumer, Consumer):  # else this worker's broker keeps no backlog
        consumer.hold(queue)
    return {"ok": f"what has not begun of {queue} goes back"}
