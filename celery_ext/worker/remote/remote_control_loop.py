"""Keeps workers with greenlets listening to remote control."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from celery import bootsteps
from celery.utils.log import get_logger

logger = get_logger(__name__)

#: How long it waits before it reconnects.
RETRY_SECONDS = 1.0


class RemoteControlLoop(bootsteps.Step):
    """Lets the greenlet that listens to remote control outlive a lost broker.

    Celery starts another one when the worker reconnects, which it does not do for an outage that
    our transport bridges.
    """

    requires = ("celery.worker.consumer.control:Control",)

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        control = parent.blueprint.steps["celery.worker.consumer.control.Control"]
        if control.is_green:
            control.box.loop = partial(listen, control.box, control.box.loop)


def listen(box: Any, loop: Any, consumer: Any) -> None:
    """Run the loop of a `gPidbox` until the worker stops it."""
    while True:
        try:
            return loop(consumer)
        except consumer.connection_errors + consumer.channel_errors as error:
            stop = box._node_shutdown
            logger.warning("Remote control connects again: %s", error)
        time.sleep(RETRY_SECONDS)
        if stop is not box._node_shutdown or stop is None or stop.is_set():
            return
