"""The broker of a test: where it is, what it holds, and when it has nothing left to do."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import redis

from ..embedded import server as embedded
from ..errors import DelayedError
from ..store.global_limits import is_global
from ..store.keys import SEPARATOR, QueueKeys
from ..store.store import Store
from .keyspace import text
from .state import QueueState, dump, merged

POLL_SECONDS = 0.005

#: `{queue}:…` with the global key prefix in front.
_BACKLOG = re.compile(r"(.*?)\{(.+)\}:(?:partitions|delayed:waiting|paused|gate:.+)", re.DOTALL)
_UNACKED = re.compile(r"(.*?)\{(.+)\}:unacked:", re.DOTALL)
#: Whether something runs in this process, and how many tasks have started.
Activity = Callable[[], tuple[bool, int]]


class NotDone(DelayedError, AssertionError):
    """Messages were left when the timeout of a test ended."""


class Broker:
    """The server of a test session, empty at the start of each test."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.socket: Path = embedded.ensure(url.partition("://")[2])
        self.client = redis.Redis(unix_socket_path=str(self.socket))
        self._stores: dict[str, Store] = {}
        self._activities: list[Activity] = []

    @property
    def result_url(self) -> str:
        """A Celery result backend on the same server, in a separate database."""
        return f"redis+socket://{self.socket}?virtual_host=1"

    def store(self, prefix: str = "") -> Store:
        """The moves of the broker's messages; `prefix` is the app's `global_keyprefix`."""
        if prefix not in self._stores:
            self._stores[prefix] = Store(self.client, prefix=prefix)
        return self._stores[prefix]

    def dump(self, queue: str, prefix: str = "") -> QueueState:
        """The whole of a queue as plain data, with all of its shards."""
        store = self.store(prefix)
        store.shards.look_again()
        return merged([dump(store, shard) for shard in store.shards.all(queue)])

    def empty(self) -> None:
        """Delete everything, including results."""
        self.client.flushall()

    def close(self) -> None:
        """Disconnect."""
        self.client.close()

    # The work that is left.

    def watch(self, activity: Activity) -> None:
        """Count tasks that this process runs and the broker no longer has."""
        self._activities.append(activity)

    def left(self) -> dict[str, int]:
        """How many messages of each queue are due, ready or unacked, without empty queues.

        A queue's name has the global key prefix in front. Replies to remote control do not count,
        and neither do messages that wait for the next token of a rate.
        """
        # In the order in which a message moves. Looking twice finds one that policies send back.
        return self._left() or self._left()

    def _left(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, count in [*self._due(), *self._ready(), *self._unacked()]:
            if count and not name.endswith(".pidbox"):
                found[name] = found.get(name, 0) + count
        return found

    def backlogs(self) -> list[tuple[str, str]]:
        """Global key prefix and name of each queue with delayed messages, limits or a pause."""
        keys = map(text, self.client.scan_iter(match="*}:*", count=1000))
        return sorted({(m[1], m[2]) for key in keys if (m := _BACKLOG.fullmatch(key))})

    def _due(self) -> Iterator[tuple[str, int]]:
        for prefix, queue in self.backlogs():
            store = self.store(prefix)
            held_back = self._held_back(store.keys(queue))
            yield prefix + queue, max(store.size(queue, with_delayed=False).due - held_back, 0)

    def _held_back(self, keys: QueueKeys) -> int:
        """Return how many wait for a rate: none has its turn, and no running task has slots."""
        with self.client.pipeline() as pipeline:
            pipeline.zcard(keys.delayed + "waiting")
            pipeline.exists(keys.gate + "turns", keys.gate + "slots")
            pipeline.zrange(keys.gate + "looks", 0, -1, withscores=True)
            pipeline.time()
            waiting, can_go_on, looks, (seconds, microseconds) = pipeline.execute()
        look_ms = looks[0][1] if looks else 0
        can_go_on = can_go_on or look_ms <= seconds * 1000 + microseconds / 1000
        # A global limit has no rate, and its slots are not among those of the queue.
        can_go_on = can_go_on or any(is_global(text(limit)) for limit, _ in looks)
        return 0 if can_go_on else int(waiting)

    def _ready(self) -> Iterator[tuple[str, int]]:
        for key in self.client.scan_iter(_type="list", count=1000):
            yield text(key).partition(SEPARATOR)[0], self.client.llen(key)

    def _unacked(self) -> Iterator[tuple[str, int]]:
        for key in self.client.scan_iter(match="*}:unacked:*", count=1000):
            if found := _UNACKED.match(text(key)):
                yield found[1] + found[2], self.client.hlen(key)

    def wait_until_done(self, timeout_seconds: float = 10) -> None:
        """Wait until nothing is due, ready, unacked or running. Delayed messages may remain.

        Raises NotDone with the names of the queues if this takes longer than the timeout.
        """
        deadline = time.monotonic() + timeout_seconds
        while (reason := self._not_done()) is not None:
            if time.monotonic() >= deadline:
                raise NotDone(f"not done in {timeout_seconds:g} seconds: {reason}")
            time.sleep(POLL_SECONDS)

    def _not_done(self) -> str | None:
        before = [look() for look in self._activities]
        left = self.left()
        after = [look() for look in self._activities]
        if left:
            return f"{_named(left)}. Does a worker consume from there?"
        # A task that has run in between may have sent others.
        if before != after or any(runs for runs, _ in after):
            return "tasks are still running"
        return None


def _named(left: dict[str, int]) -> str:
    return ", ".join(f"{count} in queue {name!r}" for name, count in sorted(left.items()))
