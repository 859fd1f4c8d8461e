"""Reads due times and messages of a backlog in pages, without a script.

This takes the server half the time of `page.lua`. Each page is read in one transaction, which also
proves that the partition index has not changed since the page was planned.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, compress, pairwise
from time import monotonic
from typing import Any, NamedTuple

from kombu_delayed.connection.commands import scored
from kombu_delayed.consumer.claiming.sources import ServerClock
from kombu_delayed.errors import MessageError
from kombu_delayed.inspection.backlog import NEVER_MS
from kombu_delayed.inspection.gate_usage import server_ms
from kombu_delayed.message.envelope import Kept, open_kept
from kombu_delayed.store.keys import QueueKeys
from kombu_delayed.store.store import Store

from .transactions import Transactions


@dataclass(frozen=True)
class Span:
    """The messages of a queue due in `[from_ms, to_ms)`. Spans of one plan do not overlap.

    Messages that moved after `last_move` are left out, because they may be found twice.
    """

    queue: str
    from_ms: int = 0
    to_ms: int = NEVER_MS
    last_move: int | None = None


class Place(NamedTuple):
    """A message's place in the backlog. Places sort as the backlog does."""

    due_ms: int
    member: bytes


class Part(NamedTuple):
    """A partition of the backlog and the lower bound of its due times."""

    name: bytes
    bound_ms: int


#: Partitions whose bounds one call reads.
INDEX_LIMIT = 1_000

#: Texts are read in calls of about this many bytes, however few they are.
PAGE_BYTES = 1_000_000

#: How many texts the first call reads, which does not know how long they are.
FIRST_TEXTS = 20


@dataclass
class Page:
    """Some messages, with their texts if requested."""

    queue: str
    partitions: list[str] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    messages: list[bytes] = field(default_factory=list)

    def add(self, part: Part, places: Sequence[Place]) -> None:
        self.partitions += [part.name.decode()] * len(places)
        self.places += places

    def between(self, first: int, end: int) -> Page:
        """A part of a page without messages."""
        return Page(self.queue, self.partitions[first:end], self.places[first:end])

    def only(self, wanted: Sequence[bool]) -> Page:
        return Page(
            self.queue,
            list(compress(self.partitions, wanted)),
            list(compress(self.places, wanted)),
            list(compress(self.steps, wanted)),
            list(compress(self.messages, wanted)),
        )


def plan(store: Store, span: Span, rows: int) -> list[Span]:
    """Cut a span at partition bounds into spans of about `rows` messages each.

    Uses the mean size of the partitions, so that it reads one bound for each span.
    """
    keys, run = store.keys(span.queue), store.run
    span = replace(span, last_move=_last(run(*_last_move(keys))))
    count = run("ZCARD", keys.partitions)
    if not count:
        return [span] if run("EXISTS", keys.waiting) else []
    each = max(1, round(rows * count / max(1, store.delayed_count(span.queue))))
    first = max(0, run("ZCOUNT", keys.partitions, "-inf", span.from_ms) - 1)
    behind = run("ZCOUNT", keys.partitions, "-inf", f"({span.to_ms}")
    edges = [span.from_ms]
    for rank in range(first + each, behind, each):
        found = _scored(run("ZRANGE", keys.partitions, rank, rank, "WITHSCORES"))
        if found and edges[-1] < found[0][1] < span.to_ms:
            edges.append(found[0][1])
    pairs = pairwise([*edges, span.to_ms])
    return [replace(span, from_ms=from_ms, to_ms=to_ms) for from_ms, to_ms in pairs]


def _last_move(keys: QueueKeys) -> tuple[Any, ...]:
    return ("ZRANGE", keys.moved, -1, -1, "WITHSCORES")


def _last(answer: Any) -> int:
    found = _scored(answer)
    return found[0][1] if found else 0


class Pager:
    """The messages of a span, page by page, each about `size` messages.

    A message that is scheduled or moved meanwhile may be in a page or not. No other message is
    missed, and none is returned twice, even by different spans. A message that moved since the
    plan, or whose due time changed since it was found, is left out.
    """

    def __init__(self, store: Store, span: Span, size: int, *, reads_messages: bool) -> None:
        self._span = span
        self._size = size
        self._keys = store.keys(span.queue)
        self._reads_messages = reads_messages
        self._texts_at_once = min(size, FIRST_TEXTS)
        self._parts_at_once = max(1, round(1.5 * size / store.partition_size))
        self._store = store
        self._ask = store.run.insist
        self._at_once = Transactions(store)
        self._last = Place(span.from_ms, b"")
        #: Messages that were read and may be found again at the gate.
        self._met: set[bytes] = set()
        #: Where pages ended, and when each was read, on the server's clock.
        self._ends: list[int] = []
        self._read_at: list[float] = []
        self._clock = ServerClock()

    def __iter__(self) -> Iterator[Page]:
        asked_at = monotonic()
        self._clock.compare(server_ms(self._store, self._span.queue), asked_at)
        try:
            # A message that reaches the gate before its partition is read is due from this time on.
            since_ms = self._earliest()
            at_gate = self._noted(self._waiting(self._span.from_ms))
            in_order = self._noted(self._pages(), True)
            for found in chain(at_gate, in_order, self._come(since_ms)):
                for page in self._texts(found) if self._reads_messages else [found]:
                    page = self._unmoved(page)
                    if page.places:
                        yield page
        finally:
            self._at_once.close()

    def _earliest(self) -> int | None:
        """The lower bound of all due times in partitions; None if there is no partition."""
        found = _scored(self._ask("ZRANGE", self._keys.partitions, 0, 0, "WITHSCORES"))
        return found[0][1] if found else None

    def _noted(self, pages: Iterator[Page], in_order: bool = False) -> Iterator[Page]:
        for page in pages:
            now_ms = self._clock.now_ms()
            self._met.update(place.member for place in page.places if place.due_ms <= now_ms)
            if in_order and page.places:
                self._ends.append(page.places[-1].due_ms)
                self._read_at.append(now_ms)
            yield page

    def _come(self, since_ms: int | None) -> Iterator[Page]:
        """The messages that reached the gate before their partition was read."""
        if since_ms is None or since_ms > self._clock.now_ms():
            return
        for page in self._waiting(max(self._span.from_ms, since_ms)):
            yield page.only([self._was_passed_over(place) for place in page.places])

    def _was_passed_over(self, place: Place) -> bool:
        n = bisect_left(self._ends, place.due_ms)
        was_due = n == len(self._ends) or place.due_ms <= self._read_at[n]
        return was_due and place.member not in self._met

    def _waiting(self, from_ms: int) -> Iterator[Page]:
        """The messages at the gate. Each page begins with the last one's end, as in `_long`."""
        key, size, part = self._keys.waiting, self._size, Part(b"waiting", from_ms)
        start = max(0, self._ask("ZCOUNT", key, "-inf", f"({from_ms}") - 1)
        last, is_more = Place(from_ms, b""), True
        while is_more:
            places = _places(self._ask("ZRANGE", key, start, start + size, "WITHSCORES"))
            if start and (not places or places[0] > last):
                start = max(0, start - size)
                continue
            page = Page(self._span.queue)
            page.add(part, [each for each in places if last < each < (self._span.to_ms, b"")])
            yield page
            last = max([last, *page.places[-1:]])
            is_more = len(places) > size and places[-1].due_ms < self._span.to_ms
            start += size

    def _pages(self) -> Iterator[Page]:
        while self._last.due_ms < self._span.to_ms:
            parts, end_ms = self._next_parts()
            for at in range(0, len(parts), self._parts_at_once):
                group, rest = (
                    parts[at : at + self._parts_at_once],
                    parts[at:][self._parts_at_once :],
                )
                group_end_ms = rest[0].bound_ms if rest else end_ms
                if not (yield from self._group(group, group_end_ms)):
                    break
                self._last = Place(group_end_ms, b"")
            else:
                self._last = Place(end_ms, b"")

    def _next_parts(self) -> tuple[list[Part], int]:
        """The next partitions of the rest of the span, and where they end."""
        parts = _parts(self._at_once(self._index(self._span.to_ms, INDEX_LIMIT)))
        if len(parts) < INDEX_LIMIT:
            return parts, self._span.to_ms
        return parts[:-1], parts[-1].bound_ms

    def _index(self, end_ms: int, limit: int) -> list[tuple[Any, ...]]:
        """Ask for the partition in which the rest begins, and those that begin before its end."""
        key, low = self._keys.partitions, self._last.due_ms
        rest = ("WITHSCORES", "LIMIT", 0)
        return [
            ("ZREVRANGEBYSCORE", key, low, "-inf", *rest, 1),
            ("ZRANGEBYSCORE", key, f"({low}", f"({end_ms}", *rest, limit),
        ]

    def _group(self, parts: list[Part], end_ms: int) -> Generator[Page, None, bool]:
        """Read partitions at one instant. Returns False if the index has changed."""
        between = (self._last.due_ms, f"({end_ms}", "BYSCORE", "LIMIT", 0, self._size + 1)
        queries = [("ZRANGE", self._key(part), *between, "WITHSCORES") for part in parts]
        floor, rest, *found = self._at_once([*self._index(end_ms, len(parts) + 1), *queries])
        if _parts([floor, rest]) != parts:
            return False
        page = Page(self._span.queue)
        for part, answer in zip(parts, found, strict=True):
            places = _places(answer)
            if len(places) <= self._size:
                page.add(part, [place for place in places if place > self._last])
                continue
            yield page
            page = Page(self._span.queue)
            self._last = max(self._last, Place(part.bound_ms, b""))
            if not (yield from self._long(part, end_ms)):
                return False
        yield page
        return True

    def _long(self, part: Part, end_ms: int) -> Generator[Page, None, bool]:
        """Read a partition of more than a page, by rank. Returns False if it was split meanwhile.

        Each page begins with the last one's end. If that message has moved down, go back to it.
        """
        key, size = self._key(part), self._size
        [below] = self._at_once([("ZCOUNT", key, "-inf", f"({self._last.due_ms}")])
        start, is_more = max(0, below - 1), True
        while is_more:
            window = ("ZRANGE", key, start, start + size, "WITHSCORES")
            floor, rest, answer = self._at_once([*self._index(end_ms, 1), window])
            if part not in _parts([floor, rest]):
                return False
            places = _places(answer)
            if start and (not places or places[0] > self._last):
                start = max(0, start - size)
                continue
            page = Page(self._span.queue)
            page.add(part, [each for each in places if self._last < each < (end_ms, b"")])
            yield page
            self._last = max([self._last, *page.places[-1:]])
            is_more = len(places) > size and places[-1].due_ms < end_ms
            start += size
        return True

    def _texts(self, page: Page) -> Iterator[Page]:
        """The page with its texts, in parts of about `PAGE_BYTES`."""
        at = 0
        while at < len(page.places):
            part = self._read(page.between(at, at + self._texts_at_once))
            at += self._texts_at_once
            if part.messages:
                mean = sum(map(len, part.messages)) / len(part.messages)
                self._texts_at_once = max(1, min(self._size, round(PAGE_BYTES / mean)))
            yield part

    def _read(self, page: Page) -> Page:
        """The page with its texts, without messages that are gone or have moved."""
        members = [place.member for place in page.places]
        records = self._store.records(self._span.queue, members)
        found = [None if record is None else _open(record) for record in records]
        pairs = zip(found, page.places, strict=True)
        stays = [kept is not None and kept.due_ms == place.due_ms for kept, place in pairs]
        kept = [each for each in compress(found, stays) if each]
        stayed = page.only(stays)
        stayed.steps = [each.step for each in kept]
        stayed.messages = [each.message for each in kept]
        return stayed

    def _unmoved(self, page: Page) -> Page:
        """A page without the messages that moved since the plan."""
        since = self._span.last_move
        if since is None or not page.places or _last(self._ask(*_last_move(self._keys))) <= since:
            return page
        members = [place.member for place in page.places]
        moves = self._ask("ZMSCORE", self._keys.moved, *members)
        return page.only([at is None or int(at) <= since for at in moves])

    def _key(self, part: Part) -> str:
        return self._keys.delayed + part.name.decode()


def _open(record: bytes) -> Kept | None:
    try:
        return open_kept(record)
    except MessageError:  # for the doctor
        return None


def _parts(answers: Sequence[Any]) -> list[Part]:
    return [Part(*each) for answer in answers for each in _scored(answer)]


def _places(answer: Any) -> list[Place]:
    return [Place(due_ms, member) for member, due_ms in _scored(answer)]


def _scored(answer: Any) -> list[tuple[bytes, int]]:
    return [(member, int(score)) for member, score in scored(answer)]
