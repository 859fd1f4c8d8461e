"""Lifecycle events as they happen, read once for all listeners."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator

from kombu_delayed.errors import UNREACHABLE
from kombu_delayed.inspection import events as streams
from kombu_delayed.inspection.events import Event
from kombu_delayed.store.store import Store

#: How often the streams are read, and how many events are passed on at a time.
INTERVAL_SECONDS, LOOK_SIZE = 0.5, 1_000

#: How many events a listener may leave unread.
MOST_UNREAD = 20_000

#: The stream id of each shard up to which it was read.
Positions = dict[str, str]

logger = logging.getLogger(__name__)


class Listener:
    """Gets events of some shards, those that it `accepts`, in the event loop that created it.

    Listeners with the same `key` want the same shards.
    """

    def __init__(
        self, key: Hashable, shards: Callable[[], Iterable[str]], accepts: Callable[[Event], bool]
    ) -> None:
        self.key, self.shards, self.accepts = key, shards, accepts
        self._loop, self._unread = asyncio.get_running_loop(), list[Event]()
        self._has_some = asyncio.Event()
        self.is_behind = False

    def send(self, events: list[Event]) -> None:
        """Pass on events, from any thread. Raises RuntimeError if the event loop has ended."""
        self._loop.call_soon_threadsafe(self._add, events)

    def _add(self, events: list[Event]) -> None:
        self.is_behind = self.is_behind or len(self._unread) > MOST_UNREAD
        if not self.is_behind:
            self._unread += events
        self._has_some.set()

    async def next(self, seconds: float) -> list[Event]:
        """The unread events; waits up to `seconds` for some, and is empty if none came."""
        try:
            await asyncio.wait_for(self._has_some.wait(), seconds)
        except (TimeoutError, asyncio.TimeoutError):
            return []
        self._has_some.clear()
        events, self._unread = self._unread, []
        return events


def next_of(entries: Iterator[list[Event]]) -> list[Event]:
    """The next events, in whole entries; empty if there are no more."""
    found = list[Event]()
    for entry in entries:
        found += entry
        if len(found) >= LOOK_SIZE:
            break
    return found


class Feed:
    """Reads the events in one thread, as long as there are listeners."""

    def __init__(self, store: Callable[[], Store]) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []
        self._positions: Positions = {}
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        #: Whether there may be more events to pass on.
        self._has_more = False

    def join(self, listener: Listener) -> Positions:
        """Listen from now on; returns the present position in each stream."""
        store = self._store()
        with self._lock:
            shards = [*listener.shards()]
            for shard in shards:
                if shard not in self._positions:
                    last = streams.newest(store, shard)
                    self._positions[shard] = last[-1].stream_id if last else "0"
            self._listeners.append(listener)
            if self._thread is None and not self._ended.is_set():
                self._thread = threading.Thread(target=self._run, name="delayed-http-events")
                self._thread.daemon = True
                self._thread.start()
            return {shard: self._positions[shard] for shard in shards}

    def leave(self, listener: Listener) -> None:
        """Stop listening. Does not wait for Redis."""
        listener.accepts = _nothing  # the thread then removes it from its list

    def close(self) -> None:
        """End the thread."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(0 if self._has_more else INTERVAL_SECONDS):
            with self._lock:
                self._listeners = [each for each in self._listeners if each.accepts is not _nothing]
                if not self._listeners:
                    self._positions, self._thread = {}, None
                    return
                events = self._look_or_end()
            for listener in self._listeners if events else ():
                self._pass_on(listener, events)

    def _look_or_end(self) -> list[Event]:
        self._has_more = False
        try:
            return self._look()
        except Exception as error:
            level = logging.INFO if isinstance(error, UNREACHABLE) else logging.ERROR
            logger.log(level, "Events cannot be read, so their streams end: %r", error)
            for listener in self._listeners:
                listener.is_behind = True
                self.leave(listener)
            return []

    def _look(self) -> list[Event]:
        some = {each.key: each for each in self._listeners}.values()
        wanted = dict.fromkeys(shard for each in some for shard in each.shards())
        # A queue that was not known before is new, so all of its events are.
        positions = {shard: self._positions.get(shard, "0") for shard in wanted}
        found = next_of(streams.merged(self._store(), positions))
        self._has_more = len(found) >= LOOK_SIZE
        self._positions = positions | {event.stream: event.stream_id for event in found}
        return found

    def _pass_on(self, listener: Listener, events: list[Event]) -> None:
        if mine := [event for event in events if listener.accepts(event)]:
            try:
                listener.send(mine)
            except RuntimeError:
                self.leave(listener)


def _nothing(event: Event) -> bool:
    return False
