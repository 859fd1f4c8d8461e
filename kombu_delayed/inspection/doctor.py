"""Looks for what contradicts itself in a queue's keys, and puts it right.

All is read in bounded pages beside running producers and consumers. What looks wrong in a page is
looked at once more by the script that repairs it, so that nothing is called wrong for having moved.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from redis import Redis

from ..connection.connection import pairs, scored
from ..store.store import CALL_LIMIT, Store, chunks
from ..transport.server_checks import check, inspect
from ..transport.server_checks import logger as server_logger
from .backlog import NEVER_MS, scan
from .faults import Finding
from .silence import silence_seconds

#: Messages that one call looks at, and about how much it reads of them.
PAGE_SIZE = 200
PAGE_BYTES = 1_000_000

#: So often the index is repaired in a row until nothing is wrong.
PASSES = 10

#: So far may the server's clock be from this machine's.
CLOCK_SKEW_SECONDS = 2.0

#: A consumer that has taken a wake token puts it back or claims within this time.
PATIENCE_SECONDS = 1.0

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Partition:
    """A partition of the backlog: its lower bound in ms since the epoch and its messages."""

    name: str
    bound_ms: int
    count: int


def partitions(store: Store, queue: str, start: int = 0) -> Iterator[Partition]:
    """The partitions of a queue in the order of their bounds, from the `start`th on."""
    keys = store.keys(queue)
    while True:
        stop = start + CALL_LIMIT - 1
        found = scored(store.run("ZRANGE", keys.partitions, start, stop, "WITHSCORES"))
        for name, bound in found:
            count = store.run("ZCARD", keys.delayed.encode() + name)
            yield Partition(_text(name), int(float(bound)), count)
        start += CALL_LIMIT
        if len(found) < CALL_LIMIT:
            return


def partition_count(store: Store, queue: str) -> int:
    """How many partitions a queue's backlog has."""
    count: int = store.run("ZCARD", store.keys(queue).partitions)
    return count


def examine_server(store: Store) -> Finding | None:
    """What the server's settings and clock make one fear; None: nothing.

    Raises ServerError where they make it unfit.
    """
    finding = Finding("server")
    with _warnings() as texts:
        for server in store.run.everywhere():
            found = inspect(Redis(connection_pool=server.pool))
            check(found, clock_skew_warning_seconds=CLOCK_SKEW_SECONDS)
    for text in texts:
        finding.count += 1
        finding.examples.append(text)
    return finding if finding.count else None


class Doctor:
    """Examines one queue; with `fix` it repairs what it finds, in the same pass.

    `progress` is called with the number of messages that were looked at.
    """

    def __init__(
        self,
        store: Store,
        queue: str,
        *,
        fix: bool = False,
        progress: Progress | None = None,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self.store = store
        self.queue = queue
        self.fix = fix
        self._keys = store.keys(queue)
        self._progress = progress or (lambda count: None)
        self._patience_seconds = patience_seconds
        self._found: dict[str, Finding] = {}
        #: Members with a fault of their entry: the pass over the messages meets them again.
        self._known: set[bytes] = set()

    def examine(self) -> list[Finding]:
        """All kinds of faults that there are."""
        # A partition that splits before all of it is right may put what is wrong behind the reader.
        for _ in range(PASSES if self.fix else 1):
            if not self._index():
                break
        self._strays()
        self._messages()
        self._names()
        self._notes()
        self._sweep_parts("repair_dead", ("dead", "messages", "reasons"))
        self._sweep("repair_ledgers")
        self._leases()
        self._gate()
        self._wake()
        self._tokens()
        return list(self._found.values())

    def _add(self, kind: str, example: str, count: int = 1, *, fixed: bool | None = None) -> None:
        finding = self._found.setdefault(kind, Finding(kind, self.queue))
        finding.add(example, self.fix if fixed is None else fixed, count)

    # The backlog.

    def _index(self) -> int:
        """Returns how many faults there were."""
        faults = 0
        limit, more = PAGE_SIZE, 1
        place: list[Any] = [b"", b"-inf", -1]
        while more:
            looked_at = dict(zip(("name", "bound", "offset"), place, strict=True))
            more, *found = self._ask("audit_index", **looked_at, limit=limit)
            place, (count, size), suspects = found[:3], found[3:5], found[5:]
            limit = _next_page(count, size)
            self._progress(count)
            faults += self._judge(pairs(suspects))
        return faults

    def _strays(self) -> None:
        """Partitions that the index has forgotten."""
        prefix = self._keys.delayed
        for key in scan(self.store, prefix):
            name = key[len(prefix.encode()) :]
            if key == self._keys.waiting.encode():
                continue
            if self.store.run("ZSCORE", self._keys.partitions, name) is not None:
                continue
            start = 0
            while members := self.store.run("ZRANGE", key, start, start + CALL_LIMIT - 1):
                faults = self._judge([(name, member) for member in members])
                # A repair takes members away, so the next ones are in front again.
                start += len(members) - (faults if self.fix else 0)

    def _messages(self) -> None:
        cursor, limit = b"0", PAGE_SIZE
        while True:
            cursor, count, size, *members = self._ask("audit_messages", cursor=cursor, count=limit)
            limit = _next_page(count, size)
            self._progress(count)
            self._judge([(b"", member) for member in members if member not in self._known])
            if int(cursor) == 0:
                return

    def _judge(self, suspects: list[tuple[bytes, bytes]]) -> int:
        """Repair them where that is wanted; returns how many had a fault."""
        count = 0
        for part in chunks(suspects):
            for (name, member), fault in zip(part, self._repair(part), strict=True):
                if fault:
                    count += 1
                    self._add(fault.decode(), _text(member or name))
                    if name and not self.fix:
                        self._known.add(member)
        return count

    def _repair(self, entries: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
        parts = [part for entry in entries for part in entry]
        answer: list[bytes] = self._ask("repair", fixes=int(self.fix), entries=parts)
        return answer

    def _ask(self, name: str, /, **given: Any) -> Any:
        return self.store.ask(name, self.queue, **given)

    # What is kept beside the messages.

    def _names(self) -> None:
        """Names that other messages are held off by."""
        self._sweep("repair_duplicates")
        self._sweep_parts("repair_unique", ("unique", "due"))

    def _notes(self) -> None:
        """What is known of expectations, and early answers."""
        keys = self._keys
        for notes, until in (
            (keys.expectations, keys.expectations_until),
            (keys.answers, keys.answers_until),
        ):
            given = {"notes": notes, "notes_until": until}
            self._sweep_parts("repair_notes", ("notes", "until"), **given)

    def _sweep_parts(self, name: str, parts: Iterable[str], **given: Any) -> None:
        seen: set[bytes] = set()
        for part in parts:
            seen = self._sweep(name, seen, part=part, **given)

    def _sweep(self, name: str, seen: Iterable[bytes] = (), **given: Any) -> set[bytes]:
        """Look at all of a kind, page by page; returns what was found wrong, now or before."""
        known, cursor, limit = {*seen}, b"0", PAGE_SIZE
        while True:
            cursor, count, size, *found = self._ask(
                name, cursor=cursor, count=limit, fixes=int(self.fix), **given
            )
            limit = _next_page(count, size)
            for id, fault in pairs(found):
                if id not in known:
                    known.add(id)
                    self._add(fault.decode(), _text(id))
            if int(cursor) == 0:
                return known

    def _gate(self) -> None:
        """After the leases: who had slots and is dead has none then."""
        keys, run = self._keys, self.store.run
        prefix = keys.slots("")
        for key in scan(self.store, prefix):
            name = _text(key[len(prefix.encode()) :])
            if not self._is_registered(name) and run("EXISTS", key):
                self._add("slots", name)
                if self.fix:
                    run("UNLINK", key)
        self._sweep("repair_gate")

    # Who consumes.

    def _leases(self) -> None:
        if self._is_another_server():
            return
        known = self.store.leases.consumers(self.queue)
        ended = {name: unacked for name, left_ms, unacked in known if left_ms <= 0}
        for name in self._silent(ended) if self.fix else ended:
            self._reclaim("lease", name, ended[name])
        registered = {name for name, _, _ in known}
        prefix = self._keys.unacked("")
        for key in scan(self.store, prefix):
            name = key[len(prefix.encode()) :].decode(errors="surrogateescape")
            # It may have come since.
            if name not in registered and not self._is_registered(name):
                self._reclaim("unregistered", name, self.store.run("HLEN", key))

    def _silent(self, consumers: Collection[str]) -> list[str]:
        """Those that renew no lease for as long as it is: the server's clock may have been set."""
        ends = {name: self._end_of(name) for name in consumers}
        seconds = [silence_seconds(name) for name in consumers]
        deadline = time.monotonic() + max(seconds, default=0.0)
        while time.monotonic() < deadline and ends:
            time.sleep(0.05)
            ends = {name: end for name, end in ends.items() if self._end_of(name) == end}
        return [*ends]

    def _end_of(self, consumer: str) -> bytes | None:
        end: bytes | None = self.store.run("ZSCORE", self._keys.consumers, consumer)
        return end

    def _is_registered(self, consumer: str) -> bool:
        return self.store.run("ZSCORE", self._keys.consumers, consumer) is not None

    def _reclaim(self, kind: str, consumer: str, unacked: int) -> None:
        shown = _text(consumer.encode(errors="surrogateescape"))
        self._add(kind, f"{shown} ({unacked} messages)")
        if self.fix:
            self.store.leases.reclaim(self.queue, consumer)

    def _is_another_server(self) -> bool:
        """Consumers had no chance yet to renew their leases since a restart or a failover."""
        granted_by: bytes | None = self.store.run("GET", self._keys.granted_by)
        if granted_by is None or self.store.now:
            return False
        info: bytes = self.store.run.to(("GET", self._keys.granted_by))("INFO", "server")
        return b"run_id:" in info and b"run_id:" + granted_by not in info

    def _wake(self) -> None:
        """Looks several times where a consumer may have a token in its hands."""
        deadline = time.monotonic() + self._patience_seconds
        while True:
            silent, watched = self._silence()
            if not silent:
                return
            if not watched or time.monotonic() >= deadline:
                break
            time.sleep(0.05)
        self._add("silent", silent)
        if self.fix:
            self.store.claimable.announce(self.queue)

    def _tokens(self) -> None:
        """Who holds nothing waits for tokens, so that one which stays has nobody who listens."""
        consumers = self._deaf()
        if not consumers:
            return
        if self.fix:
            self.store.run("ZREM", self._keys.wake, "now", "due")
            self.store.claimable.announce(self.queue)
        still = self._deaf() if self.fix else consumers
        for name in consumers:
            self._add("untaken", name, fixed=name not in still)

    def _deaf(self) -> set[str]:
        """Idle consumers beside which a token stays for longer than it takes them to meet."""
        idle, tokens = self._idle(), self._tokens_now()
        deadline = time.monotonic() + self._patience_seconds
        while idle and tokens and time.monotonic() < deadline:
            time.sleep(0.05)
            idle, tokens = idle & self._idle(), tokens & self._tokens_now()
        return idle if tokens else set()

    def _idle(self) -> set[str]:
        consumers = self.store.leases.consumers(self.queue)
        return {name for name, left_ms, unacked in consumers if left_ms > 0 and not unacked}

    def _tokens_now(self) -> set[tuple[Any, Any]]:
        return {*_tokens(self.store, self._keys.wake)}

    def _silence(self) -> tuple[str, bool]:
        """What nobody has been told of (or empty), and whether somebody consumes."""
        keys, run = self._keys, self.store.run
        size = self.store.size(self.queue)
        # Moves put message and token at once, so who looks at messages first misses none.
        tokens = {name for name, _ in _tokens(self.store, keys.wake)}
        holder = (run("GET", keys.armed) or b"").partition(b" ")[2].decode(errors="replace")
        consumers = self.store.leases.consumers(self.queue)
        living = {name for name, left_ms, _ in consumers if left_ms > 0}
        missing = []
        if size.ready and b"now" not in tokens:
            missing.append(f"{size.ready} ready")
        if size.delayed and not tokens and holder not in living:
            missing.append(f"{size.delayed} delayed")
        return ", ".join(missing), bool(living)


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What a check of the server warns of."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    server_logger.logger.addHandler(handler)
    try:
        yield texts
    finally:
        server_logger.logger.removeHandler(handler)


def _next_page(count: int, size: int) -> int:
    """How many messages the next call looks at, after one of `count` with `size` bytes."""
    return max(min(PAGE_SIZE, PAGE_BYTES * count // max(size, 1)), 1) if count else PAGE_SIZE


def _tokens(store: Store, key: str) -> list[tuple[Any, Any]]:
    """Wake tokens with when to claim; who waits for one, on a Cluster, has a higher score."""
    return scored(store.run("ZRANGEBYSCORE", key, "-inf", NEVER_MS, "WITHSCORES"))


def _text(name: bytes) -> str:
    return name.decode(errors="backslashreplace")
