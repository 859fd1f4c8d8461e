"""The delayed messages of a queue, for operators: read, cancel, reschedule, count."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, pairwise
from shlex import quote
from typing import NamedTuple

from ..connection.commands import keys_like, numbers, scored
from ..errors import MessageError
from ..message.compressing import expand
from ..message.envelope import Kept, open_kept, step_char
from ..message.packing import Glance, glance, unpack
from ..message.ticket import lane_in, reason_of
from ..message.zstd import Codec
from ..store.calls.caller import without_errors
from ..store.calls.scripts import Call
from ..store.calls.shards import queue_of
from ..store.global_limits import is_pool
from ..store.keys import literal
from ..store.store import CALL_LIMIT, Store, chunks

#: How many messages one call looks at.
PAGE_SIZE = 500

#: A call stops after a part of a partition when it returns this many bytes.
PAGE_BYTES = 1_000_000

#: How many partitions one call counts.
FORECAST_LIMIT = 2_000

#: Keys that only a queue has.
_KINDS = (
    "(?:partitions|messages|dictionaries|paused|wake|consumers|unacked:.*|dead|dead-messages"
    "|events|expectations|answers|outcomes:used)"
)

#: Later than any due time.
NEVER_MS = 2**53


class Waiting:
    """A delayed message. `member` is its name in the backlog: its id, with a suffix if ids repeat.

    `kept` is read on first use. `seen` is what is known before that, if anything.
    """

    __slots__ = "_codec", "_compressed", "_kept", "_record", "member", "seen"

    def __init__(self, member: str, kept: Kept | None = None, compressed: bytes = b"") -> None:
        self.member = member
        self.seen: Glance | None = None
        self._kept = kept
        self._compressed = compressed
        self._record = b""
        self._codec: Codec | None = None

    @classmethod
    def unread(cls, member: str, record: bytes, seen: Glance, codec: Codec | None) -> Waiting:
        """A message with a packed record, and with a codec if that is compressed, too."""
        self = cls(member)
        self.seen, self._record, self._codec = seen, record, codec
        return self

    @property
    def kept(self) -> Kept:
        """Its step, due time and text."""
        if self._kept is None:
            text = record = unpack(self.member, self._record)
            if self._codec is not None:
                self._compressed = record
                with suppress(MessageError):  # a damaged record stays as it is
                    text = expand(record, self._codec)
            self._kept = open_kept(text)
        return self._kept

    @property
    def compressed(self) -> bytes:
        """Its record as scripts see it if that is compressed, otherwise empty."""
        return self._compressed if self.kept else b""

    @property
    def id(self) -> str:
        """The task id."""
        return self.member.partition("\x1f")[0]


class Move(NamedTuple):
    """A new due time for an id: ms since the epoch, or `+` and ms from the server's current time.

    `eta` is the same in ISO 8601, for the header; empty leaves the header as it is.
    """

    id: str
    due: str
    eta: str = ""


class Place(NamedTuple):
    """Where a page ends: the due time in ms and the member of the last message looked at."""

    due_ms: int
    member: bytes


class Page(NamedTuple):
    """A page of a backlog, and where the next one begins, or None if it was the last.

    `looked_at` counts all messages that were looked at, even those without the needle.
    """

    waiting: list[Waiting]
    following: Place | None
    looked_at: int


@dataclass(frozen=True)
class Partition:
    """A partition of the backlog: its lower bound in ms since the epoch and its messages."""

    name: str
    bound_ms: int
    count: int


class Backlog:
    """The backlog of one queue. Every change is one script, and so is atomic."""

    def __init__(self, store: Store, queue: str) -> None:
        self.store = store
        self.queue = queue
        self._keys = store.keys(queue)

    def get(self, id: str) -> list[Waiting]:
        """Return the messages with a task id. There may be several."""
        run, keys = self.store.run, self._keys
        numbers = range(2, int(run("HGET", keys.duplicates, id) or 1) + 1)
        members = [id, *(f"{id}\x1f{n}" for n in numbers)]
        given = {"hash": keys.messages}
        found = [
            self.store.ask("records", self.queue, **given, fields=some) for some in chunks(members)
        ]
        pairs = zip(members, chain.from_iterable(found), strict=True)
        return [
            waiting_of(self.store, self.queue, name, record) for name, record in pairs if record
        ]

    def pages(
        self,
        due_after_ms: int = 0,
        due_before_ms: int = NEVER_MS,
        needle: str = "",
        size: int | None = None,
    ) -> Iterator[list[Waiting]]:
        """Yield all messages due in `[due_after_ms, due_before_ms)`, by due time, in bounded pages.

        With a `needle`, only those with it in the text of a header, and all compressed messages,
        since the server cannot read them. A message that is scheduled or moved meanwhile may be
        missing, but no other. `size` is how many messages a call looks at.
        """
        place: Place | None = None
        while True:
            found, place, _ = self.page(place, due_after_ms, due_before_ms, needle, size)
            yield found
            if place is None:
                return

    def page(
        self,
        after: Place | None = None,
        due_after_ms: int = 0,
        due_before_ms: int = NEVER_MS,
        needle: str = "",
        size: int | None = None,
    ) -> Page:
        """Return one page, like `pages`."""
        more, looked_at, due_ms, last, *found = self.store.ask(
            "page",
            self.queue,
            from_ms=after.due_ms if after else due_after_ms,
            after=b"=" + after.member if after else b"",
            until_ms=due_before_ms,
            limit=size or PAGE_SIZE,
            limit_bytes=PAGE_BYTES,
            needle=needle,
        )
        following = Place(int(due_ms), last[1:]) if more else None
        return Page(waiting_in(self.store, self.queue, found), following, looked_at)

    def take(self, ids: Iterable[str]) -> Iterator[Waiting]:
        """Drop the messages with these task ids and yield them. Each call takes some of the ids."""
        for part in chunks(list(ids)):
            answer = self.store.ask("cancel", self.queue, how="read", ids=part)
            yield from waiting_in(self.store, self.queue, answer)

    def cancel(self, ids: Iterable[str], *, members: bool = False) -> list[int]:
        """Drop messages. Returns how many there were, for each id.

        An id stands for all messages that share it. With `members`, each is a `Waiting.member`,
        which stands for one.
        """
        how = "one" if members else "all"
        counts: list[int] = []
        for part in chunks(list(ids)):
            counts += numbers(self.store.ask("cancel", self.queue, how=how, ids=part))
        return counts

    def reschedule(self, moves: Iterable[Move], *, members: bool = False) -> list[int]:
        """Give messages another due time. Returns how many there were, for each move.

        A time that has passed makes them ready. `members` is as for `cancel`.
        """
        counts: list[int] = []
        for part in chunks(list(moves)):
            move, given = self.reschedule_call(part, members)
            counts += numbers(move(self.store.run, **given))
        return counts

    def reschedule_call(self, moves: Sequence[Move], members: bool = False) -> Call:
        """Return the script that reschedules, and its arguments."""
        entries = [text for move in moves for text in move]
        return self.store.call("reschedule", self.queue, whole=int(not members), entries=entries)

    def revise(self, waiting: Waiting, step: int, message: bytes, due_ms: int) -> bool:
        """Give a message another text, priority step and due time.

        A time that has passed makes it ready. Returns False if it is no longer delayed, or has been
        changed since it was read.
        """
        kept = waiting.kept
        read = f"{step_char(kept.step)}{kept.due_ms}".encode() + kept.message
        return bool(
            self.store.ask(
                "revise",
                self.queue,
                member=waiting.member.encode(errors="surrogateescape"),
                expected=waiting.compressed or read,
                due_ms=due_ms,
                record=step_char(step).encode() + message,
            )
        )

    def forecast(self, edges_ms: Sequence[int]) -> list[int]:
        """Count those due before the first edge, from each edge to the next, and after the last.

        Counts with the partition index: the cost grows with the number of partitions before the
        last edge.
        """
        if len(edges_ms) > CALL_LIMIT or list(edges_ms) != sorted(edges_ms):
            raise ValueError(f"a forecast takes at most {CALL_LIMIT} edges, in ascending order")
        run, keys = self.store.run, self._keys
        counts = self._waiting_between(edges_ms)
        last = run("ZCOUNT", keys.partitions, "-inf", f"({edges_ms[-1]}") if edges_ms else 0
        for start in range(0, last, FORECAST_LIMIT):
            limit = min(FORECAST_LIMIT, last - start)
            more, *found = self.store.ask(
                "forecast", self.queue, start=start, limit=limit, edges=edges_ms
            )
            counts = [a + b for a, b in zip(counts, found, strict=True)]
            if not more:
                return counts
        counts[-1] += max(self.store.delayed_count(self.queue) - sum(counts), 0)
        return counts

    def _waiting_between(self, edges_ms: Sequence[int]) -> list[int]:
        """Count the messages that wait at the gate in the same way. They are in no partition."""
        run, key = self.store.run, self._keys.waiting
        if not run("EXISTS", key):
            return [0] * (len(edges_ms) + 1)
        bounds = pairwise(["-inf", *edges_ms, "+inf"])
        return [run("ZCOUNT", key, low, f"({high}") for low, high in bounds]

    def reason(self, member: str) -> str | None:
        """Return why a due message waits at the gate, or None if it does not."""
        return reasons(self.store, [(self.queue, member)])[0]


def reasons(store: Store, members: Sequence[tuple[str, str]]) -> list[str | None]:
    """Return why each message waits at the gate of its queue, or None if it does not.

    Each of `members` is a queue and the name of a message in its backlog. All are asked for
    together.
    """
    names = [(queue, member.encode(errors="surrogateescape")) for queue, member in members]
    scores = store.run.many([("ZSCORE", store.keys(queue).waiting, name) for queue, name in names])
    return [
        None if score is None else _reason(store, *name)
        for name, score in zip(names, without_errors(scores), strict=True)
    ]


def _reason(store: Store, queue: str, name: bytes) -> str:
    [record] = store.records(queue, [name])
    limit = store.run("HGET", store.keys(queue).gate + "lanes", lane_in(record or b""))
    return reason_of((limit or b"").decode())


def waiting_in(store: Store, queue: str, answer: Sequence[bytes]) -> list[Waiting]:
    """Return the messages in a script's answer, where each follows its name."""
    return [
        waiting_of(store, queue, member.decode(errors="surrogateescape"), record)
        for member, record in zip(answer[::2], answer[1::2], strict=True)
    ]


def waiting_of(store: Store, queue: str, member: str, record: bytes) -> Waiting:
    """Return a message, given its record in the backlog. Raises CompressionError, MessageError."""
    seen = glance(record)
    if seen is not None:
        codec = store.dictionaries.codec(queue, seen.version) if seen.version else None
        if codec is not None or not seen.version:
            return Waiting.unread(member, record, seen, codec)
    record = unpack(member, record)
    text = store.readable(queue, record)
    return Waiting(member, _opened(queue, member, text), b"" if text is record else record)


def _opened(queue: str, member: str, text: bytes) -> Kept:
    try:
        return open_kept(text)
    except MessageError as error:
        name = queue_of(queue)
        raise MessageError(
            f"message {member!r} in queue {name!r} cannot be read: {error}. Make it a dead letter "
            f"with: celery delayed doctor --fix -Q {quote(name)}"
        ) from error


def scan(store: Store, prefix: str, pattern: str = "*") -> Iterator[bytes]:
    """Yield keys that consist of a prefix and a match of a SCAN pattern, some more than once."""
    if store.cluster:
        store.cluster.look()  # a node may have been added, and nothing has redirected us there
    for server in store.run.everywhere():
        yield from keys_like(server, literal(prefix) + pattern, PAGE_SIZE)


def queues(store: Store) -> set[str]:
    """Return the queues that have messages, dead letters, consumers, events or outcomes.

    Scans the names of all keys. A ready list alone does not count: its name could be any.
    """
    return {queue for queue in queues_with(store, _KINDS, "*") if not is_pool(queue)}


def queues_with(store: Store, kinds: str, pattern: str = "") -> set[str]:
    """Return the queues that have keys of some kinds. `pattern` finds them with SCAN, if given."""
    prefix = store.keys("").prefix
    known = re.compile(re.escape(prefix) + r"\{(.+)\}:" + kinds, re.DOTALL)
    keys = (
        key.decode(errors="replace") for key in scan(store, prefix, "{*}:" + (pattern or kinds))
    )
    return {store.queue_with(match[1]) for match in map(known.fullmatch, keys) if match}


def partitions(store: Store, queue: str, start: int = 0) -> Iterator[Partition]:
    """Yield the partitions of a queue in the order of their bounds, from number `start` on."""
    keys = store.keys(queue)
    while True:
        stop = start + CALL_LIMIT - 1
        found = scored(store.run("ZRANGE", keys.partitions, start, stop, "WITHSCORES"))
        for name, bound in found:
            count = store.run("ZCARD", keys.delayed.encode() + name)
            yield Partition(name.decode(errors="backslashreplace"), int(float(bound)), count)
        start += CALL_LIMIT
        if len(found) < CALL_LIMIT:
            return


def partition_count(store: Store, queue: str) -> int:
    """Return how many partitions a queue's backlog has."""
    count: int = store.run("ZCARD", store.keys(queue).partitions)
    return count
