"""The Kombu side of one channel."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from .consuming import ConsumingChannel
from .fanout import FanoutChannel
from .publishing import PublishingChannel
from .queues import QueueChannel


class Channel(PublishingChannel, ConsumingChannel, FanoutChannel, QueueChannel):
    """A channel of Kombu's Redis transport whose messages wait in Redis until they are due."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().__init__(*args, **kwargs)
            self._look_at_server()
        except BaseException:
            # Kombu would keep its id. It has 65,535, and a program may try as often in an outage.
            with suppress(AttributeError, ValueError):
                self.connection._used_channel_ids.remove(self.channel_id)
            raise

    def _look_at_server(self) -> None:
        try:
            _ = self.store
        except Exception:
            self.connection.cycle.discard(self)
            self._disconnect_pools()
            raise
