"""Spreads a queue over shards. Each shard is a queue of its own in Redis, and so in one slot.

Shard 0 has the queue's own name, so that a queue can be spread, and merged again, while it has
messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from copy import copy
from time import monotonic
from typing import TypeVar
from zlib import crc32

from redis.exceptions import ResponseError

from ...connection.commands import pairs
from ...connection.connection import ServerConnection
from ...connection.native import get_logger
from ...errors import UNREACHABLE
from ..keys import shard_count, shard_counts
from .scripts import script

logger = get_logger(__name__)

#: Separates the name of a queue from the number of a shard.
MARK = "\x1f"

#: How often a process checks whether another one spreads a queue over more shards than it knows.
LOOK_SECONDS = 10.0

#: While the node that knows the number cannot be reached, it is asked this often.
RETRY_SECONDS = 1.0

#: How many queues without shards are remembered.
WHOLE = 10_000

#: Queues of Celery's remote control and events. Each process has some.
CELERY_OWN = re.compile(r"\.pidbox$|^celeryev\.")


def shard_name(queue: str, number: int) -> str:
    """The name of a shard in Redis."""
    return f"{queue}{MARK}{number}" if number else queue


def queue_of(shard: str) -> str:
    """The queue that a shard belongs to."""
    queue, _, number = shard.partition(MARK)
    return queue if number.isdecimal() else shard


def is_shard(name: str) -> bool:
    """Whether this is a shard other than shard 0, which has the name of its queue."""
    return queue_of(name) != name


def _home(queue: str, id: str, count: int) -> str:
    return shard_name(queue, crc32(id.encode(errors="surrogatepass")) % count)


def number_of(shard: str) -> int:
    """The number of a shard, from 0."""
    return int(shard.partition(MARK)[2]) if is_shard(shard) else 0


def label(shard: str) -> str:
    """The name of a shard for people."""
    return f"{queue_of(shard)}, shard {number_of(shard)}" if is_shard(shard) else shard


Self = TypeVar("Self", bound="Shards")


class Shards:
    """The shards of each queue. `configured` is the transport option `delayed_shards`.

    Redis remembers the highest number of shards of each queue, for consumers and for maintenance.
    """

    def __init__(
        self,
        run: ServerConnection,
        prefix: str = "",
        configured: int | Mapping[str, int] = 1,
    ) -> None:
        self._run = run
        self._over = run.generation
        self._key = shard_counts(prefix)
        self._configured = configured
        self._most: dict[str, int] = {}
        self._whole: set[str] = set()
        self._looked_at = -LOOK_SECONDS
        self._leaves_out: Callable[[str], bool] | None = None

    def over(self: Self, run: ServerConnection) -> Self:
        """The same shards, asked for over another connection."""
        other = copy(self)
        other._run, other._over = run, run.generation
        return other

    def keep_whole(self, queue: str) -> None:
        """Never spread this queue: it is temporary, and its number would stay in Redis."""
        if len(self._whole) >= WHOLE:
            self._whole.clear()
        self._whole.add(queue)

    def count(self, queue: str) -> int:
        """The number of shards for messages that are sent now."""
        if self._configured == 1 or queue in self._whole:
            return 1
        if not isinstance(self._configured, int):
            return self._configured.get(queue, 1)
        return 1 if CELERY_OWN.search(queue) else self._configured

    def home(self, queue: str, id: str) -> str:
        """The shard for a message that is sent now."""
        count = self.count(queue)
        if count == 1:
            return queue
        if count > self._known(queue):
            self._most[queue] = self._raise(queue, count)
        return _home(queue, id, count)

    #: The shard to send a message to: its home, or another shard that can take it.
    place = home

    def all(self, queue: str) -> tuple[str, ...]:
        """All shards that may have messages, even if messages now go to fewer."""
        found: tuple[str, ...] = (queue,)
        if not is_shard(queue):
            count = max(self._known(queue), self.count(queue))
            found = tuple(shard_name(queue, n) for n in range(count))
        leaves_out = self._leaves_out
        return found if leaves_out is None else tuple(n for n in found if not leaves_out(n))

    def without(self: Self, leaves_out: Callable[[str], bool]) -> Self:
        """The same object, but `all` leaves out some shards."""
        other = copy(self)
        other._leaves_out = leaves_out
        return other

    def among(self, queues: Iterable[str]) -> list[str]:
        """Return the queues of which `all` does not leave out every shard."""
        return (
            [*queues] if self._leaves_out is None else [each for each in queues if self.all(each)]
        )

    def nearest(self, queue: str, id: str) -> tuple[str, ...]:
        """`all` shards, beginning with the one that most likely has the message with this id."""
        found = self.all(queue)
        home = _home(queue, id, self.count(queue))
        return (home, *(name for name in found if name != home)) if home in found else found

    def look_again(self) -> None:
        """Ask Redis again in the next call, for callers that must not miss a shard."""
        self._looked_at = -LOOK_SECONDS

    def look_at_all(self, queues: Iterable[str]) -> None:
        """Ask Redis now how many shards these queues have, in few round trips."""
        self.look_again()

    def seen(self, shards: Iterable[str]) -> None:
        """Note that these shards have messages. A server that lost data may not know of them."""
        for shard in filter(is_shard, shards):
            queue, count = queue_of(shard), number_of(shard) + 1
            if count > self._known(queue):
                self._most[queue] = count
                with suppress(ResponseError):  # the user may only read
                    self._most[queue] = self._raise(queue, count)

    def forget(self, queue: str) -> None:
        """Forget the shards of a queue that is deleted."""
        if self._most.pop(queue, 1) > 1:
            self._run("HDEL", self._key, queue)

    def _raise(self, queue: str, count: int) -> int:
        """Record the number of shards of a queue; returns the highest number that it ever had."""
        most: int = script("shards")(self._run, counts=self._key, queue=queue, count=count)
        return most

    def _known(self, queue: str) -> int:
        """The highest number of shards of a queue, as far as remembered."""
        self._notice_connection()
        now = monotonic()
        if now - self._looked_at >= LOOK_SECONDS:
            found = pairs(self._run("HGETALL", self._key))
            self._most = {
                name.decode(errors="surrogateescape"): int(count) for name, count in found
            }
            self._looked_at = now
        return self._most.get(queue, 1)

    def _notice_connection(self) -> None:
        """Ask again after a reconnect: the server may have lost its data."""
        if self._over != (generation := self._run.generation):
            self._over = generation
            self.look_again()


class QueueShards(Shards):
    """`Shards` for a Cluster: stored next to each queue, so that no queue needs another's node.

    `is_down` returns whether the node of a shard is known not to answer.
    """

    def __init__(
        self,
        run: ServerConnection,
        prefix: str = "",
        configured: int | Mapping[str, int] = 1,
        is_down: Callable[[str], bool] = lambda shard: False,
    ) -> None:
        super().__init__(run, prefix, configured)
        self._run_many = run.many
        self._prefix = prefix
        self._is_down = is_down
        self._seen_at: dict[str, float] = {}
        #: Queues whose node could not be asked in the last attempt.
        self._unknown: set[str] = set()

    def look_again(self) -> None:
        """Ask Redis again in the next call, for callers that must not miss a shard."""
        self._seen_at.clear()

    def place(self, queue: str, id: str) -> str:
        """The home of a message, or another shard while the node of its home is down."""
        home, count = self.home(queue, id), self.count(queue)
        if count == 1 or not self._is_down(home):
            return home
        first = number_of(home)
        others = (shard_name(queue, (first + n) % count) for n in range(1, count))
        return next((shard for shard in others if not self._is_down(shard)), home)

    def look_at_all(self, queues: Iterable[str]) -> None:
        """Ask Redis now, or in the next call if the node that knows is down."""
        self.look_again()
        asked = [queue for queue in queues if not is_shard(queue)]
        commands = [("HGET", shard_count(queue, self._prefix), queue) for queue in asked]
        answers, now = self._run_many(commands), monotonic()
        for queue, answer in zip(asked, answers, strict=True):
            if not isinstance(answer, BaseException):
                self._most[queue], self._seen_at[queue] = int(answer or 1), now

    def forget(self, queue: str) -> None:
        """Forget the shards of a queue that is deleted."""
        self._seen_at.pop(queue, None)
        if self._most.pop(queue, 1) > 1:
            self._run("DEL", shard_count(queue, self._prefix))

    def _raise(self, queue: str, count: int) -> int:
        if queue in self._unknown:
            return 1  # tried again once the node has been asked
        key = shard_count(queue, self._prefix)
        try:
            most: int = script("shards")(self._run, counts=key, queue=queue, count=count)
        except UNREACHABLE as error:
            self._cannot_ask(queue, error)
            return 1
        return most

    def _known(self, queue: str) -> int:
        """The highest number of shards, from the node if it answers, else as remembered."""
        self._notice_connection()
        now = monotonic()
        if now - self._seen_at.get(queue, -LOOK_SECONDS) >= LOOK_SECONDS:
            self._seen_at[queue] = now
            try:
                key = shard_count(queue, self._prefix)
                self._most[queue] = int(self._run("HGET", key, queue) or 1)
                self._unknown.discard(queue)
            except UNREACHABLE as error:
                self._cannot_ask(queue, error)
        return self._most.get(queue, 1)

    def _cannot_ask(self, queue: str, error: BaseException) -> None:
        self._unknown.add(queue)
        self._seen_at[queue] = monotonic() - LOOK_SECONDS + RETRY_SECONDS
        logger.info("Cannot ask how many shards queue %r has now: %s", queue, error)
