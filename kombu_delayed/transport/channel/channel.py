"""The Kombu side of one channel."""

from __future__ import annotations

from typing import Any

from .consuming import ConsumingChannel
from .fanout import FanoutChannel
from .publishing import PublishingChannel
from .queues import QueueChannel


class Channel(PublishingChannel, ConsumingChannel, FanoutChannel, QueueChannel):
    """A channel of Kombu's Redis transport whose messages wait in Redis until they are due."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        try:
            _ = self.store  # looks at the server
        except Exception:
            self.connection.cycle.discard(self)
            self._disconnect_pools()
            raise
