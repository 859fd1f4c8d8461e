"""A remote control command: a queue was paused, so give back what has not begun.

Imported in workers only: it adds a command to the remote control of this process.
"""

from __future__ import annotations

from typing import Any

from celery.worker import control

from kombu_delayed.consumer.consumer import Consumer

from ...control.policies.pauses import HOLD


@control.control_command(name=HOLD, args=[("queue", str)], signature="<queue>")
def hold(state: Any, queue: str, **kwargs: Any) -> dict[str, str]:
    """Give back the messages of a paused queue that have not begun."""
    channel = getattr(state.consumer.task_consumer, "channel", None)
    consumer = getattr(channel, "consumer", None)
    if isinstance(consumer, Consumer):  # else this worker's broker keeps no backlog
        consumer.hold(queue)
    return {"ok": f"what has not begun of {queue} goes back"}
