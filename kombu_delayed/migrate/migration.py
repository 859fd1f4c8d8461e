"""The base of both directions: the queues, the report, and the move itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ..errors import UrlError
from ..store.calls.scripts import whole
from ..store.calls.shards import label
from ..store.keys import literal
from ..store.store import Store

if TYPE_CHECKING:
    from ..transport.channel.channel import Channel

Progress: TypeAlias = Callable[[int], Any]

#: How many messages that stay are listed. The others are only counted.
LIST_LIMIT = 1_000


class Move(NamedTuple):
    """A change of state of messages of one queue."""

    queue: str
    source: str
    target: str


class Left(NamedTuple):
    """A message that was not moved."""

    key: str
    id: str
    reason: str


@dataclass
class Report:
    """Messages that were moved, or would be. `young` were held too briefly by stock workers.

    `seen` is the number of messages read, `left` the first of those that were not moved.
    """

    moves: Counter[Move] = field(default_factory=Counter)
    left: list[Left] = field(default_factory=list)
    left_count: int = 0
    young: int = 0
    seen: int = 0
    blockers: list[str] = field(default_factory=list)

    @property
    def moved(self) -> int:
        """How many messages there are in all moves."""
        return sum(self.moves.values())

    def count(self, queue: str, source: str, target: str, messages: int) -> None:
        """Add to one move."""
        if messages:
            self.moves[Move(label(queue), source, target)] += messages

    def leave(self, key: str, id: str, reason: str) -> None:
        """Record a message that stays."""
        self.left_count += 1
        if len(self.left) < LIST_LIMIT:
            self.left.append(Left(key, id, reason))


class Entry(NamedTuple):
    """One message for migrate.lua: `name` is its tag, or its member in the backlog."""

    name: bytes
    id: str
    due_ms: int
    record: bytes


class Migration:
    """One direction. Each of its `steps` moves a page. It may be killed between two steps."""

    def __init__(self, channel: Channel, queues: Iterable[str] = (), *, dry: bool = False) -> None:
        if channel.store.cluster:
            raise UrlError("a Cluster has no stock transport to move messages from, or back to")
        self.channel = channel
        self.store: Store = channel.store
        self.client: Any = channel.store.client
        self.report = Report()
        self.dry = dry
        self._given = tuple(queues)

    def blockers(self) -> list[str]:
        """Return the reasons why it would not be safe now."""
        raise NotImplementedError

    def steps(self) -> Iterator[int]:
        """Move page by page. Yields the number of messages that each step read."""
        raise NotImplementedError

    def run(self, progress: Progress | None = None) -> Report:
        """Take all steps."""
        for seen in self.steps():
            self.report.seen += seen
            if progress is not None:
                progress(seen)
        return self.report

    def queues(self) -> list[str]:
        """Return the given queues, those with a binding, and those with a backlog."""
        found = {*self._given, *(queue for queue, _ in self._scan("messages*"))}
        for key in self.client.scan_iter(match=self._glob("_kombu.binding.*"), count=1000):
            for binding in self.client.smembers(key):
                found.add(text_of(binding).split(self.channel.sep)[-1])
        return sorted(found - {""})

    def _scan(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield queues that have our key with this name, and the part of the key after the name."""
        skip = len(self.channel.global_keyprefix) + 1
        for key in self.client.scan_iter(match=self._glob("{*}:" + name), count=1000):
            queue, _, rest = text_of(key)[skip:].partition("}:" + name.removesuffix("*"))
            yield queue, rest

    def _glob(self, pattern: str) -> str:
        return literal(self.channel.global_keyprefix) + pattern

    def _call(self, queue: str, source: str, entries: Sequence[Entry], **more: Any) -> Any:
        """Return the command that runs migrate.lua."""
        prefix = self.channel.global_keyprefix
        call = self.store.call(
            "migrate",
            queue,
            stock_unacked=prefix + self.channel.unacked_key,
            stock_index=prefix + self.channel.unacked_index_key,
            source=source,
            entries=[part for entry in entries for part in entry],
            **{"until_seconds": 0, "keep": 0, "start": 0, "stop": 0, **more},
        )
        return whole(*call)

    def _transaction(self, calls: Iterable[Any]) -> list[tuple[int, int]]:
        """Run these calls of migrate.lua, all or none. Returns (delayed, ready) of each."""
        with self.client.pipeline(transaction=True) as pipeline:
            for call in calls:
                pipeline.execute_command(*call)
            return [(delayed, ready) for delayed, ready in pipeline.execute()]


def text_of(name: bytes) -> str:
    """Return a name in Redis as readable text."""
    return name.decode(errors="replace")
