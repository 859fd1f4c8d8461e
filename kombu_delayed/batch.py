"""`Producer.batch()` of Kombu 5.7: many messages in few calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kombu.transport import redis as stock
from redis import Redis

from .store import CALL_LIMIT, Entry, Store, queue_call

if TYPE_CHECKING:
    from .channel import Channel


class Outbox:
    """Stands in for the batch's pipeline: gathers messages by queue, sends them together."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._client: Redis = store.client
        self.reset()

    def reset(self) -> None:
        """Forget what was gathered."""
        self._queued: dict[tuple[str, str, int], list[Entry]] = {}
        self._fanout: list[tuple[str, str]] = []

    def schedule(self, queue: str, entry: Entry, expires_ms: int) -> None:
        """A message with a due time."""
        self._queued.setdefault(("schedule", queue, expires_ms), []).append(entry)

    def put(self, queue: str, entry: Entry, expires_ms: int) -> None:
        """A message for now."""
        self._queued.setdefault(("publish", queue, expires_ms), []).append(entry)

    def publish(self, topic: str, payload: str) -> None:
        """A fanout message."""
        self._fanout.append((self._prefix + topic, payload))

    def execute(self) -> None:
        """Send all, without retry: some may have arrived when it fails."""
        with self._client.pipeline(transaction=False) as pipeline:
            for (verb, queue, expires_ms), entries in self._queued.items():
                call = self._store.schedule_call if verb == "schedule" else self._store.publish_call
                for at in range(0, len(entries), CALL_LIMIT):
                    queue_call(pipeline, *call(queue, entries[at : at + CALL_LIMIT], expires_ms))
            for topic, payload in self._fanout:
                pipeline.publish(topic, payload)
            pipeline.execute()
        self.reset()


if hasattr(stock, "PublishBatch"):

    class PublishBatch(stock.PublishBatch):
        """Kombu's batch with an outbox for a pipeline."""

        def __init__(self, channel: Channel, max_size: int) -> None:
            super().__init__(channel, max_size)
            self.pipeline: Any = Outbox(channel.store, channel.global_keyprefix)
