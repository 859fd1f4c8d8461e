"""Reads the messages at the gate of a queue, and the slots in use, in bounded calls."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple
from urllib.parse import unquote

from ..connection.commands import hash_pages, pairs, scored
from ..message.ticket import Use, plain, slot_name
from ..store.store import Store, chunks

#: How many lanes and limits one call looks at, and how many lanes if few of them match a pattern.
PAGE_SIZE, FEW_SIZE = 250, 2_000

_LANE = re.compile(r"-?\d+\|[^|*]*\*\d+\.?\d*(?:\||$)")
_USE = re.compile(r"\|(!?)([^|*]+)\*(\d+)")


class Lane(NamedTuple):
    """A line of messages, and the limit it waits for, named as in slots; "" if for its turn.

    Times are ms since the epoch. `size` may include messages that have been cancelled since.
    """

    name: str
    limit: str
    size: int
    first_due_ms: int

    @property
    def turn(self) -> tuple[str, float]:
        """The key with which it takes turns, and the key's weight."""
        key, _, weight = self.name.split("|", 2)[1].partition("*")
        return _text(key), float(weight)

    @property
    def uses(self) -> list[Use]:
        """The capacity that each message uses."""
        _, _, *rest = self.name.split("|", 2)
        found = _USE.findall(f"|{rest[0]}") if rest else []
        return [Use(*parts_of(use), int(cost), bool(passes)) for passes, use, cost in found]


class Room(NamedTuple):
    """How much of a limit with a key is in use, and until when its tokens are spent, in ms."""

    slots: int
    until_ms: float


def of_key(key: str) -> str:
    """Return a pattern of the lanes that have a key for their turns or for a limit."""
    return f"*[|:]{plain(key)}\\**"


def of_slot(slot: str) -> str:
    """Return a pattern of the lanes that use the limit and key with this name in slots."""
    return f"*[|!]{slot}\\**"


def lanes(store: Store, queue: str, pattern: str = "") -> Iterator[list[Lane]]:
    """Yield the lanes of a queue that have messages, a page per call. A lane may come twice.

    With a `pattern`, only those that match it.
    """
    size = FEW_SIZE if pattern else PAGE_SIZE
    for page in store.in_pages("lanes", queue, count=size, pattern=pattern or "*"):
        each = zip(*[iter(page)] * 4, strict=True)
        yield [lane for parts in each if (lane := _lane(*parts))]


def _lane(name: bytes, limit: bytes, size: int, due_ms: bytes) -> Lane | None:
    text = name.decode(errors="replace")
    if _LANE.match(text) is None:
        return None
    return Lane(text, limit.decode(errors="replace"), size, int(due_ms))


def first_ids(store: Store, queue: str, names: Iterable[str], count: int) -> list[str]:
    """Return the first messages of some lanes, by due time, with their names in the backlog."""
    found: list[tuple[float, bytes]] = []
    for name in names:
        line = f"{store.keys(queue).gate}lane:{name}"
        page = store.run("ZRANGE", line, 0, count - 1, "WITHSCORES")
        found += [(float(at), id) for id, at in scored(page)]
    return [id.decode(errors="surrogateescape") for _, id in sorted(found)[:count]]


def parts_of(slot: str) -> tuple[str, str]:
    """Return the limit and the key of a name in slots. A long key is given as its digest."""
    limit, _, key = slot.partition(":")
    return _text(limit), _text(key)


def known_as(name: str) -> str:
    """Return a name or a key as it is read back here: a long one as its digest."""
    return parts_of(slot_name(name))[0]


def _text(part: str) -> str:
    return unquote(part, errors="replace") if "%" in part else part


def waiting_count(store: Store, queue: str) -> int:
    """Return how many messages wait at the gate of a queue."""
    count: int = store.run("ZCARD", store.keys(queue).waiting)
    return count


def slots_in_use(store: Store, queue: str) -> dict[str, int]:
    """Return the slots in use in a queue, by limit and key as named in tickets."""
    found = store.run("HGETALL", store.keys(queue).gate + "slots")
    return {name.decode(): int(count) for name, count in pairs(found)}


class Holder(NamedTuple):
    """A message that occupies slots at a gate, its consumer, and since when, in ms.

    Id and time are empty if they were not recorded. `slots` are named as in tickets.
    """

    consumer: str
    id: str
    since_ms: int | None
    slots: dict[str, int]


def holders(store: Store, queue: str, limit: int) -> list[Holder]:
    """Return the messages that occupy slots at the gate of a queue, at most `limit`."""
    found = store.ask("running", queue, limit=limit)
    texts = [each.decode(errors="replace") for each in found]
    return [_holder(*each) for each in zip(texts[::2], texts[1::2], strict=True)]


def _holder(consumer: str, text: str) -> Holder:
    front, _, _ = text.partition("|")
    id, _, since = front.partition("@")
    uses = {use: int(cost) for _, use, cost in _USE.findall(text)}
    return Holder(consumer, _text(id), int(since) if since.isdigit() else None, uses)


def slots(store: Store, queue: str) -> Iterator[dict[str, int]]:
    """Yield how much of each limit and key is in use, named as in slots, a page per call."""
    for page in hash_pages(store.run, store.keys(queue).gate + "slots", PAGE_SIZE):
        yield {name.decode(errors="replace"): int(count) for name, count in page}


def room(store: Store, queue: str, limits: Iterable[str]) -> tuple[int, dict[str, Room]]:
    """Return the server's time in ms, and how much of some limits is in use, named as in slots."""
    now_ms, found = 0, dict[str, Room]()
    for part in chunks(list(limits)):
        now_ms, *answer = store.ask("room", queue, limits=part)
        each = zip(part, answer[::2], answer[1::2], strict=True)
        found |= {name: Room(int(used), float(until)) for name, used, until in each}
    return now_ms, found


def server_ms(store: Store, queue: str) -> int:
    """Return the current time in ms by the clock of the queue's server."""
    return int(store.ask("room", queue, limits=[])[0])


def turns(store: Store, queue: str, keys: Sequence[str]) -> dict[str, int]:
    """Return how many keys have their turn before each of these, if it has turns."""
    found: dict[str, int] = {}
    for part in chunks(keys):
        ranks = store.ask("turns", queue, keys=[plain(key) for key in part])
        found |= {key: rank for key, rank in zip(part, ranks, strict=True) if rank >= 0}
    return found
