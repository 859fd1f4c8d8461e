"""Consumers and their messages: renew leases, reclaim from dead consumers, leave."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..connection.cluster.connection import SlotMoves
from ..connection.commands import pairs
from ..connection.native import get_logger
from ..errors import NodeDown
from .calls import instrumentation
from .calls.caller import CALL_LIMIT, Caller, chunks, without_errors
from .calls.scripts import Call

logger = get_logger(__name__)

#: How many tags of a consumer's messages one call sorts.
SORT_LIMIT = 1_000


class Other(NamedTuple):
    """A lease of another consumer that has expired by the server's clock, or ends too late."""

    queue: str
    consumer: str
    end_ms: float


@dataclass
class Renewal:
    """The result of a check of the leases of some queues.

    All times are milliseconds of the server's clock. None means that there is no such lease.
    """

    now_ms: int = 0
    #: When the first of the caller's own leases would have ended without this call.
    own_end_ms: int | None = None
    #: When the first lease of another consumer ends.
    next_end_ms: int | None = None
    #: Queues in which the caller has lost its lease.
    lost: list[str] = field(default_factory=list)
    #: Queues in which the lease was renewed and the caller holds nothing.
    idle: set[str] = field(default_factory=set)
    #: Queues that could not be asked.
    failed: list[str] = field(default_factory=list)
    others: list[Other] = field(default_factory=list)

    def add(self, queues: Sequence[str], answer: Any) -> None:
        """Add the script's answer for some queues; None if they could not be asked."""
        if answer is None:
            self.failed.extend(queues)
            return
        now_ms, own_ms, next_ms, lost, idle, odd = answer
        self.now_ms = max(self.now_ms, now_ms)
        self.own_end_ms = _earlier(self.own_end_ms, own_ms)
        self.next_end_ms = _earlier(self.next_end_ms, next_ms)
        self.lost.extend(queues[n - 1] for n in lost)
        self.idle.update(queues[n - 1] for n in idle)
        for n, name, end_ms in zip(odd[::3], odd[1::3], odd[2::3], strict=True):
            consumer = name.decode(errors="surrogateescape")
            self.others.append(Other(queues[n - 1], consumer, float(end_ms)))


class Leases:
    """The consumers of the queues of a store."""

    def __init__(self, store: Caller) -> None:
        self._store = store

    def hold_keys(
        self, queue: str, held: Sequence[tuple[str, str, int]], on_error: Callable[[], None]
    ) -> None:
        """Let tasks, given as (unique key, id, ms), hold their keys that long; 0 for ended tasks.

        Does not wait: `on_error` is called later if the server did not do it.
        """
        entries = [part for each in held for part in each]
        self._store.post(*self._store.call("hold", queue, entries=entries), on_error)

    def ends(self, queue: str) -> list[tuple[str, int]]:
        """Each consumer's name, and ms until its lease ends; first to end first.

        Bytes of a name that are not UTF-8 become surrogates, as all functions with a name expect.
        """
        found = self._store.ask("consumers", queue)
        names = [name.decode(errors="surrogateescape") for name in found[::2]]
        return [*zip(names, map(int, found[1::2]), strict=True)]

    def consumers(self, queue: str) -> list[tuple[str, int, int]]:
        """Each consumer as in `ends`, with the number of its unacked messages."""
        ends, keys = self.ends(queue), self._store.keys(queue)
        commands = [("HLEN", keys.unacked(name)) for name, _ in ends]
        counts = without_errors(self._store.run.many(commands))
        return [(*each, count) for each, count in zip(ends, counts, strict=True)]

    def renew(self, queue: str, consumer: str, lease_ms: int) -> list[str] | None:
        """Renew the lease in one queue; returns None if it was lost.

        Otherwise returns the consumers whose lease there has expired by the server's clock, which
        need not be dead. Raises connection errors, and NodeDown if the queue's node could not be
        asked.
        """
        renewal = self.renew_all([queue], [queue], consumer, lease_ms, lease_ms)
        if renewal.failed:
            raise NodeDown(f"the node that has queue {queue!r} cannot be reached now")
        ended = (other for other in renewal.others if other.end_ms <= renewal.now_ms)
        return None if renewal.lost else [other.consumer for other in ended]

    def renew_all(
        self,
        queues: Sequence[str],
        renewed: Collection[str],
        consumer: str,
        lease_ms: int,
        idle_ms: int,
        auto_delete: Collection[str] = (),
    ) -> Renewal:
        """Check the leases in all `queues`, and renew those of `consumer` in the `renewed` ones.

        A lease lasts for `idle_ms` in a queue where the consumer holds nothing. A queue in
        `auto_delete` leaves nothing behind if its only consumer does not call again. One round trip
        covers many queues.
        """
        parts = [*chunks(queues, self._store.renewals_at_once)]
        calls = [
            self._store.call(
                "renew",
                part[0],
                consumer,
                keys=self._keys_to_renew(part, consumer),
                lease_ms=lease_ms,
                idle_ms=idle_ms,
                renewed=[
                    -n if queue in auto_delete else n
                    for n, queue in enumerate(part, 1)
                    if queue in renewed
                ],
            )
            for part in parts
        ]
        renewal = Renewal()
        for part, answer in zip(parts, self._store.together(calls), strict=True):
            renewal.add(part, self._heard(answer))
        return renewal

    def _heard(self, answer: Any) -> Any:
        """The answer for some leases; None if their node cannot be asked. Raises other errors."""
        if isinstance(answer, self._store.errors_of_one_queue):
            logger.info("Cannot renew the lease on a queue now: %s", answer)
            return None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _keys_to_renew(self, queues: Sequence[str], consumer: str) -> list[str]:
        keys = [self._store.keys(queue) for queue in queues]
        return [
            *(each.consumers for each in keys),
            *(each.unacked(consumer) for each in keys),
            *(each.slots(consumer) for each in keys),
        ]

    def was_reclaimed(self, queue: str, consumer: str) -> bool:
        """Whether other consumers got messages of this consumer within the last day."""
        return bool(self._store.run("EXISTS", self._store.keys(queue).reclaimed(consumer)))

    def reclaim(self, queue: str, consumer: str, ended_ms: float | None = None) -> int:
        """Put back the messages of a consumer whose lease has expired; returns how many.

        With `ended_ms`, only if its lease still ends then: a consumer that has renewed its lease
        since is not dead.
        """
        self._sort_held(queue, consumer)
        given = {"limit": CALL_LIMIT, "ended_ms": "" if ended_ms is None else ended_ms}
        total, left = 0, 1
        while left:
            returned, left, *buried = self._store.ask("reclaim", queue, consumer, **given)
            total += returned
            instrumentation.count_buried(self._store, queue, buried)
        if total and (meter := instrumentation.current) is not None:
            meter.reclaimed(queue, total)
        return total

    def recover(self, queue: str, consumer: str, seen_tag: int) -> list[tuple[int, bytes]]:
        """The messages that were handed to `consumer` in an answer that never arrived."""
        given = {"seen_tag": seen_tag, "count": CALL_LIMIT}
        pages = self._store.in_pages("recover", queue, consumer, **given)
        return sorted({int(tag): text for page in pages for tag, text in pairs(page)}.items())

    def recover_all(
        self, seen_tags: Mapping[str, int], consumer: str
    ) -> dict[str, list[tuple[int, bytes]]]:
        """`recover` each queue, given with the last tag that did arrive, in few round trips.

        Queues that are moving to another node of a Cluster are left out.
        """
        given = {"cursor": b"0", "count": CALL_LIMIT}
        calls = [
            self._store.call("recover", queue, consumer, seen_tag=tag, **given)
            for queue, tag in seen_tags.items()
        ]
        found = {}
        for queue, answer in zip(tuple(seen_tags), self._store.together(calls), strict=True):
            if isinstance(answer, list) and int(answer[0]) == 0:
                found[queue] = sorted(zip(map(int, answer[1::2]), answer[2::2], strict=True))
            else:
                with suppress(SlotMoves):
                    found[queue] = self.recover(queue, consumer, seen_tags[queue])
        return found

    def tags(self, queues: Collection[str], consumer: str) -> dict[str, tuple[set[int], set[int]]]:
        """The tags that `consumer` holds in each queue, and the tags that have slots there.

        Queues that cannot be asked now are left out.
        """
        found: dict[str, tuple[set[int], set[int]]] = {}
        cursors = dict.fromkeys(queues, b"0")
        while cursors:
            calls = [
                self._store.call("tags", queue, consumer, cursor=cursor, count=CALL_LIMIT)
                for queue, cursor in cursors.items()
            ]
            answers = zip(tuple(cursors), self._store.together(calls), strict=True)
            cursors = {}
            for queue, answer in answers:
                if isinstance(answer, BaseException):
                    found.pop(queue, None)
                    continue
                cursor, *pages = answer
                for known, page in zip(found.setdefault(queue, (set(), set())), pages, strict=True):
                    known.update(map(int, page))
                if int(cursor):
                    cursors[queue] = cursor
        return found

    def keep_slots(
        self, queue: str, consumer: str, entries: Sequence[tuple[int, str, str]]
    ) -> None:
        """Restore the slots of messages, given as (tag, id, slots), on a server that lost them."""
        for some in chunks(entries):
            given = [part for each in some for part in each]
            self._store.ask("keep_slots", queue, consumer, entries=given)

    def leave(self, queue: str, consumer: str, running: Collection[int | str] = ()) -> None:
        """Release all messages of `consumer`, pass its promise on and end its lease.

        While `running` messages, given by their tags, have slots, those slots and the lease stay.
        """
        self._sort_held(queue, consumer)
        move, given = self._leave_call(queue, consumer, running)
        while move(self._store.run, **given):
            pass

    def _leave_call(self, queue: str, consumer: str, running: Collection[int | str]) -> Call:
        tags = " ".join(map(str, running))
        return self._store.call("leave", queue, consumer, limit=CALL_LIMIT, running=tags)

    def leave_all(
        self, queues: Sequence[str], consumer: str, running: Callable[[str], Collection[int | str]]
    ) -> dict[str, BaseException]:
        """`leave` each queue, in few round trips; returns the errors, by queue."""
        held = self._store.run.many(
            [("HLEN", self._store.keys(queue).unacked(consumer)) for queue in queues]
        )
        each = zip(queues, held, strict=True)
        few = [q for q, count in each if not isinstance(count, int) or count <= SORT_LIMIT]
        calls = [self._leave_call(queue, consumer, running(queue)) for queue in few]
        found = dict.fromkeys(queues, 1) | dict(zip(few, self._store.together(calls), strict=True))
        errors: dict[str, BaseException] = {}
        for queue, left in found.items():
            if isinstance(left, BaseException):
                errors[queue] = left
            elif left:
                self.leave(queue, consumer, running(queue))
        return errors

    def _sort_held(self, queue: str, consumer: str) -> None:
        """Sort the held tags in several calls: without a prefetch limit there may be any number."""
        if self._store.run("HLEN", self._store.keys(queue).unacked(consumer)) <= SORT_LIMIT:
            return
        for _ in self._store.in_pages("sort_held", queue, consumer, count=SORT_LIMIT):
            pass


def _earlier(known_ms: int | None, found_ms: int) -> int | None:
    if not found_ms:
        return known_ms
    return found_ms if known_ms is None else min(known_ms, found_ms)
