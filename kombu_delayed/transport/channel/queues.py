"""The queues of a channel: declare, count, purge and delete them, each over its shards."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any

from ...errors import UNREACHABLE, OptionError, ServerFull
from ...store.calls.shards import is_shard, number_of, queue_of
from ...store.keys import is_taken
from .connecting import ConnectingChannel


class QueueChannel(ConnectingChannel):
    """Declares queues and deletes them. The size of a queue counts messages ready or due."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        #: The bindings that a full server has refused.
        self._unbound: list[tuple[str, str, str, str]] = []
        super().__init__(*args, **kwargs)

    def _new_queue(self, queue: str, *args: Any, **kwargs: Any) -> None:
        if is_shard(queue):
            raise OptionError(
                f"a queue cannot be named {queue!r}: that is the name of shard "
                f"{number_of(queue)} of queue {queue_of(queue)!r}"
            )
        if self.sep in queue:
            raise OptionError(
                f"a queue cannot be named {queue!r}: {self.sep!r} separates name and priority in "
                "the keys of lists (transport option sep)"
            )
        if is_taken(queue):
            raise OptionError(
                f"a queue cannot be named {queue!r}: the broker keeps something else under this "
                "name in Redis"
            )
        super()._new_queue(queue, *args, **kwargs)
        if queue in self._expires or queue in self.auto_delete_queues or kwargs.get("exclusive"):
            self.store.shards.keep_whole(queue)

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str, queue: str) -> None:
        try:
            super()._queue_bind(exchange, routing_key, pattern, queue)
        except ServerFull:
            # No error: a worker that starts now frees memory, and most often it is bound already.
            self._unbound.append((exchange, routing_key, pattern, queue))
            warnings.warn(
                f"the server is full: queue {queue!r} is bound to exchange {exchange!r} when it "
                "has memory again",
                stacklevel=2,
            )

    def _refresh_bindings(self, queues: list[str]) -> None:
        with suppress(ServerFull):  # they last for two more refreshes
            super()._refresh_bindings(queues)

    def bind_refused(self) -> None:
        """Bind what a full server has refused. Raises ServerFull if it still does."""
        for each in tuple(self._unbound):
            super()._queue_bind(*each)
            self._unbound.remove(each)

    def _size(self, queue: str) -> int:
        shards = self.store.shards.all(queue)
        sizes = [self.store.size(shard, with_delayed=False) for shard in shards]
        return sum(size.ready + size.due for size in sizes)

    def _has_queue(self, queue: str, **kwargs: Any) -> bool:
        return any(any(self.store.size(shard)) for shard in self.store.shards.all(queue))

    def _purge(self, queue: str) -> int:
        self.store.shards.look_again()
        return sum(map(self.store.purge, self.store.shards.all(queue)))

    def _drop_queue(self, queue: str, *args: Any, **kwargs: Any) -> None:
        super()._delete(queue, *args, **kwargs)

    def _delete(self, queue: str, *args: Any, **kwargs: Any) -> None:
        self._drop_queue(queue, *args, **kwargs)
        for exchange in [*self.state.exchanges.values()]:  # else its publishers bind it again
            table = exchange["table"]
            table[:] = [binding for binding in table if binding[2] != queue]
        for shard in self.store.shards.all(queue):
            self.store.delete(shard)
        self.store.shards.forget(queue)

    def queue_delete(
        self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any
    ) -> Any:
        """Delete a queue; with `if_empty` only when nothing is ready or delayed in it."""
        self.store.shards.look_again()
        if if_empty and self._has_queue(queue):
            return None
        # A channel that closes deletes its own queues, and closes without the server, too.
        with suppress(*(UNREACHABLE if self._closing else ())):
            return super().queue_delete(queue, if_unused=if_unused, **kwargs)
        return None
