"""Makes a revoke last if its sender knows no backlog, such as Flower with a `redis://` URL."""

from __future__ import annotations

import random
from functools import partial
from threading import Thread
from typing import Any

from celery import bootsteps
from celery.utils.log import get_logger

from ...control.changes.revoked import BY_ID, Revoked, ids_in, revoke
from ...errors import BROKER_FAILS, BrokerError

logger = get_logger(__name__)

#: A sender that knows the backlog takes the tasks out of it itself, and has this long to do so. The
#: spread keeps workers that receive a revoke together from all doing it at the same time.
WAIT_SECONDS, SPREAD_SECONDS = 1.0, 2.0


class HeardRevokes(bootsteps.Step):
    """Takes revoked tasks out of the backlog if the broker does not know of the revoke."""

    requires = ("celery.worker.consumer.control:Control",)

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        self._parent = parent
        node = parent.blueprint.steps["celery.worker.consumer.control.Control"].box.node
        node.handle_message = partial(self._hear, node.handle_message)

    def _hear(self, handle: Any, body: Any, message: Any = None) -> Any:
        ids = _ids_for_all(body)
        if ids:
            seconds = WAIT_SECONDS + random.uniform(0, SPREAD_SECONDS)
            self._parent.timer.call_after(seconds, self._start, (ids,))
        return handle(body, message)

    def _start(self, ids: list[str]) -> None:
        """Start a thread, because the worker's event loop, which calls this, must not block."""
        Thread(target=self._make_last, args=(ids,), name="delayed-revokes", daemon=True).start()

    def _make_last(self, ids: list[str]) -> None:
        delayed = self._parent.app.delayed
        try:
            if unknown := Revoked(delayed).unknown(ids):
                revoke(delayed, unknown)
        except BrokerError:  # a broker without a backlog
            return
        except BROKER_FAILS as error:
            logger.warning("A revoke that was not sent with this broker may not last: %s", error)


def _ids_for_all(body: Any) -> list[str]:
    """The ids of the tasks that all workers are told to revoke."""
    if body.get("method") not in BY_ID or body.get("destination") or body.get("pattern"):
        return []
    return ids_in(body.get("arguments") or {})
