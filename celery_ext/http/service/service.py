"""The objects that all requests of one process share."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from celery import Celery
from kombu.utils.functional import LRUCache

from celery_ext.app.queues import own_queues, routed_queue
from celery_ext.control.delayed import Delayed
from celery_ext.metrics.measuring import measure
from celery_ext.metrics.queues import registry_of
from kombu_delayed.store.keys import http_cursors, http_tokens

from ..auth.identity import ANYBODY, Identity
from ..options import HttpOptions
from ..problems import Problem, busy, refused
from .cache import Cache
from .create_once import OnceMoves
from .feed import Feed
from .threads import Threads, Together
from .writer import Writer

T = TypeVar("T")

#: How long the names of the broker's queues are cached, and how long for metrics.
NAMES_SECONDS, METRICS_NAMES_SECONDS = 5.0, 60.0

#: For how many shards it is known when their leases were looked at.
SHARDS_LOOKED_AT = 10_000


class Places:
    """At most `most` requests at a time. Errors name them by `what`.

    One token may have half of these places, or half of `shared` if that is given.
    """

    def __init__(self, most: int, what: str, shared: int | None = None) -> None:
        self._most, self._what, self._shared = most, what, max(shared or most, 2)
        self.taken: Counter[str] = Counter()
        self.closed = False

    def begin(self, identity: Identity) -> None:
        """Take a place. Raises a Problem if all are taken, or if this token has its half."""
        if self.closed or self.taken.total() >= self._most:
            raise busy(f"too many {self._what} are open", 503, 5)
        if identity is not ANYBODY and 2 * self.taken[identity.name] >= self._shared:
            raise busy(f"too many {self._what} of this token are open", 429, 5)
        self.taken[identity.name] += 1

    @contextmanager
    def place(self, identity: Identity) -> Iterator[None]:
        """Hold a place within a block. Raises as `begin`."""
        self.begin(identity)
        try:
            yield
        finally:
            self.end(identity)

    def end(self, identity: Identity) -> None:
        self.taken[identity.name] -= 1
        self.taken += Counter()  # removes identities that have no place


class Service:
    """An app's backlog over HTTP. `close` ends its threads and connections."""

    def __init__(self, app: Celery, options: HttpOptions | None = None, jobs_only: bool = False):
        self.app = app
        self.options = options or HttpOptions.of(app)
        self.jobs_only = jobs_only
        self.delayed = Delayed(app)
        self.moves = OnceMoves(self.delayed)
        threads, waiting = self.options.threads, self.options.waiting
        self.threads = Threads(threads, waiting, self.options.answer_seconds)
        self._together = WeakKeyDictionary[Any, dict[Any, Together[Any]]]()
        self.writer = Writer(self.delayed, self.options.rows_waiting, self.options.answer_seconds)
        self.meter = measure()
        #: Recent readings, shared by all requests.
        self.cache = Cache()
        self.gauges = registry_of(self.delayed, self._measured_queues)
        self.feed = Feed(lambda: self.delayed.store)
        self.closing = False
        self.streams = Places(self.options.streams, "streams")
        self.polls = Places(self.options.polls, "long polls")
        self.searches = Places(threads + waiting, "searches", threads)
        #: When a waiting program last looked for expired leases in a shard.
        self.looked_at: Any = LRUCache(SHARDS_LOOKED_AT)
        #: The names of the queues, which are slow to find among all keys.
        self._names = Cache()
        self._reachable_names, self._reachable_cache = Cache(), Cache()

    @property
    def errors_of_one_queue(self) -> tuple[type[BaseException], ...]:
        """The errors of a call after which other queues can be used."""
        return self.delayed.errors_of_one_queue

    def reachable(self) -> Service | None:
        """A copy without the nodes of a Cluster that do not answer, or None if all answer."""
        if (rest := self.delayed.reachable()) is None:
            return None
        other = copy(self)
        other.delayed, other.moves = rest, OnceMoves(rest)
        other._names, other.cache = self._reachable_names, self._reachable_cache
        return other

    def close(self) -> None:
        """Send the accepted tasks, then stop."""
        self.end_streams()
        self.writer.close()
        self.threads.close()
        self.delayed.close()

    def end_streams(self) -> None:
        """End the streams, which would otherwise never end."""
        self.closing = self.streams.closed = self.polls.closed = True
        self.feed.close()

    def check_broker(self) -> None:
        """Ask the broker for an answer; raises what the call raises if there is none.

        In a Cluster it asks the node that has the tokens: without that node, no token is accepted.
        """
        store = self.delayed.store
        store.run("EXISTS", http_tokens(store.keys("").prefix))

    def cursor_key(self) -> bytes:
        """The key to the cursors of tokens for tenants, which all servers of the broker share."""
        store = self.delayed.store
        name = http_cursors(store.keys("").prefix)
        if (key := store.run("GET", name)) is None:
            store.run("SET", name, secrets.token_hex(32), "NX")
            key = store.run("GET", name)
        return bytes(key)

    def together(self, function: Callable[[Service, Sequence[T]], Any]) -> Together[T]:
        """The object that calls a function with the items of all requests that wait for it."""
        made = self._together.setdefault(asyncio.get_running_loop(), {})
        if (found := made.get(function)) is None:
            found = Together(self.threads, partial(function, self), self.options.waiting)
            made[function] = found
        return found

    # Queues.

    def own_queues(self) -> list[str]:
        """The queues of the app, which are searched first."""
        return own_queues(self.app)

    def queues(self, identity: Identity, queue: str | None = None) -> list[str]:
        """The given queue, or all that the caller may see. It blocks: call it in a thread.

        Raises a Problem if the caller may not see the given queue.
        """
        if queue is not None:
            identity.check_queue(queue)
            return [queue]
        return [name for name in self._known(NAMES_SECONDS) if identity.sees_queue(name)]

    def shards(self, identity: Identity, queue: str | None = None) -> list[str]:
        shards = self.delayed.store.shards
        return [shard for name in self.queues(identity, queue) for shard in shards.all(name)]

    def _measured_queues(self) -> list[str]:
        names = self._known(METRICS_NAMES_SECONDS)
        return [*dict.fromkeys([*self.own_queues(), *names])]

    def _known(self, seconds: float) -> list[str]:
        return self._names.get("names", seconds, self.delayed.queues)

    def forget_names(self) -> None:
        self._names.forget()
        self._reachable_names.forget()

    # Tasks.

    def check_task(self, name: str) -> None:
        """Raises a Problem for a task that may not be scheduled."""
        if self.jobs_only:
            raise Problem.of_field("task", "this server has HTTP jobs only: give topic, callback")
        if not self.may_schedule(name):
            near = get_close_matches(name, filter(self.may_schedule, self.app.tasks), 1)
            advice = f"did you mean {near[0]!r}?" if near else "the server's app does not allow it"
            raise Problem.of_field("task", f"{name[:100]!r} cannot be scheduled: {advice}")

    def check_route(self, identity: Identity, name: str, *given: Any) -> None:
        """Raises a Problem for a task whose queue the caller may not see, or that has none."""
        if not identity.queues:  # sending it checks its route
            return
        try:
            queue = routed_queue(self.app, name, *given)
        except Exception as error:  # an unknown queue, or any error of a router
            raise refused(f"{type(error).__name__}: {error}") from None
        identity.check_queue(queue)

    def may_schedule(self, name: str) -> bool:
        if name.startswith(("celery.", "celery_ext.")):
            return False
        if self.options.tasks:
            return any(fnmatchcase(name, pattern) for pattern in self.options.tasks)
        return name in self.app.tasks

    # Streams.

    async def pause(self, seconds: float) -> bool:
        """Wait; returns False if the server is shutting down, so that the stream must end."""
        until = time.monotonic() + seconds
        while not self.closing and (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, 0.2))
        return not self.closing
