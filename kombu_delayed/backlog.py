"""The delayed messages of a queue, for who looks after them: read, cancel, reschedule, count."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .keys import literal
from .message import Kept, open_kept
from .scripts import script
from .store import CALL_LIMIT, Store, chunks

#: Messages that one call looks at.
PAGE_SIZE = 1_000

#: Bytes that one call returns at the most, and then the rest of a partition.
PAGE_BYTES = 1_000_000

#: Partitions that one call counts.
FORECAST_LIMIT = 2_000

#: Keys that only a queue has.
_KINDS = "(?:partitions|messages|wake|consumers|unacked:.*|dead|dead-messages|events)"

#: Later than any due time.
NEVER_MS = 2**53


class Waiting(NamedTuple):
    """A delayed message. `member` is its name in the backlog: its id, or more where ids repeat."""

    member: str
    kept: Kept

    @property
    def id(self) -> str:
        """The task id."""
        return self.member.partition("\x1f")[0]


class Move(NamedTuple):
    """Another due time for an id: ms since the epoch, or `+` and ms from the server's now.

    `eta` is the same in ISO 8601, for the header; empty leaves the header as it is.
    """

    id: str
    due: str
    eta: str = ""


class Backlog:
    """The backlog of one queue. Every change is one script: it happened, or it did not."""

    def __init__(self, store: Store, queue: str) -> None:
        self.store = store
        self.queue = queue
        self._keys = store.keys(queue)

    def get(self, id: str) -> list[Waiting]:
        """The messages with a task id, of which there may be several."""
        run, keys = self.store.run, self._keys
        numbers = range(2, int(run("HGET", keys.duplicates, id) or 1) + 1)
        members = [id, *(f"{id}\x1f{n}" for n in numbers)]
        found = zip(members, run("HMGET", keys.messages, *members), strict=True)
        return [Waiting(member, open_kept(record)) for member, record in found if record]

    def pages(
        self,
        due_after_ms: int = 0,
        due_before_ms: int = NEVER_MS,
        needle: str = "",
        size: int | None = None,
    ) -> Iterator[list[Waiting]]:
        """All messages due in `[due_after_ms, due_before_ms)`, by due time, a bounded page a call.

        Only those with `needle` in their text, if one is given. What is scheduled or moved
        meanwhile may be in a page or not; nothing else is passed over. `size` is how many messages
        a call looks at.
        """
        keys = self._keys
        more, due_ms, last = 1, str(due_after_ms), b""
        while more:
            more, due_ms, last, *found = script("page")(
                self.store.run,
                partitions=keys.partitions,
                delayed=keys.delayed,
                messages=keys.messages,
                from_ms=due_ms,
                after=last,
                until_ms=due_before_ms,
                limit=size or PAGE_SIZE,
                limit_bytes=PAGE_BYTES,
                needle=needle,
            )
            yield _waiting(found)

    def take(self, ids: Iterable[str]) -> Iterator[Waiting]:
        """Drop the messages with these task ids, some of the ids a call, and return them."""
        for part in chunks(list(ids)):
            yield from _waiting(self._cancel(part, whole=1, reads=1))

    def cancel(self, ids: Iterable[str], *, members: bool = False) -> list[int]:
        """Drop messages; returns how many there were, for each id.

        An id stands for all messages that share it; with `members`, a `Waiting.member` for one.
        """
        parts = chunks(list(ids))
        return [n for part in parts for n in self._cancel(part, whole=int(not members), reads=0)]

    def _cancel(self, ids: Sequence[str], whole: int, reads: int) -> list[Any]:
        keys = self._keys
        given = {**self.store.backlog_keys(keys), **self.store.event_keys(keys)}
        return script("cancel")(self.store.run, **given, whole=whole, reads=reads, ids=ids)

    def reschedule(self, moves: Iterable[Move], *, members: bool = False) -> list[int]:
        """Give messages another due time; returns how many there were, for each.

        A time that has come makes them ready. `members` is as for `cancel`.
        """
        counts: list[int] = []
        for part in chunks(list(moves)):
            counts += script("reschedule")(
                self.store.run,
                **self.store.backlog_keys(self._keys),
                **self.store.event_keys(self._keys),
                ready=self._keys.ready,
                now=self.store.now,
                partition_size=self.store.partition_size,
                steps=self._keys.steps,
                whole=int(not members),
                entries=[text for move in part for text in move],
            )
        return counts

    def forecast(self, edges_ms: Sequence[int]) -> list[int]:
        """How many are due before the first edge, from each edge to the next, and after the last.

        Counted from the partition index: what it costs grows with the number of partitions.
        """
        if len(edges_ms) > CALL_LIMIT or list(edges_ms) != sorted(edges_ms):
            raise ValueError(f"a forecast takes at most {CALL_LIMIT} edges, in ascending order")
        counts, start, more = [0] * (len(edges_ms) + 1), 0, 1
        while more:
            more, *found = script("forecast")(
                self.store.run,
                partitions=self._keys.partitions,
                delayed=self._keys.delayed,
                start=start,
                limit=FORECAST_LIMIT,
                edges=edges_ms,
            )
            counts = [a + b for a, b in zip(counts, found, strict=True)]
            start += FORECAST_LIMIT
        return counts


def _waiting(answer: Sequence[bytes]) -> list[Waiting]:
    return [
        Waiting(member.decode(errors="surrogateescape"), open_kept(record))
        for member, record in zip(answer[::2], answer[1::2], strict=True)
    ]


def scan(store: Store, prefix: str, pattern: str = "*") -> Iterator[bytes]:
    """Keys that begin with a prefix and go on as a pattern of SCAN says, some more than once."""
    cursor = b"0"
    while True:
        cursor, page = store.run(
            "SCAN", cursor, "MATCH", literal(prefix) + pattern, "COUNT", PAGE_SIZE
        )
        yield from page
        if int(cursor) == 0:
            return


def queues(store: Store) -> set[str]:
    """The queues that have messages, dead letters, consumers or events.

    They are found by looking at the names of all keys; a ready list's is like any other.
    """
    prefix = store.keys("").prefix
    known = re.compile(re.escape(prefix) + r"\{(.+)\}:" + _KINDS, re.DOTALL)
    matches = (
        known.fullmatch(key.decode(errors="replace")) for key in scan(store, prefix, "{*}:*")
    )
    return {match[1] for match in matches if match}
