"""Finds the shards for the messages of a backup, which may have been made with other shards."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from ..message.envelope import Unique, unique_key
from ..store.store import Store
from .expectations import ANSWER_HEADER

#: How many ids one call looks for.
LOOK_LIMIT = 100

#: Member, record and, for a dead letter, its note.
Item = tuple[bytes, ...]


def by_shard(
    store: Store, queue: str, items: Iterable[Item]
) -> Iterator[tuple[str, list[Item], list[Item]]]:
    """Yield each shard, the items that go to it, and those that another shard already has."""
    shards = store.shards.all(queue)
    if len(shards) == 1:
        yield queue, [*items], []
        return
    homes: dict[str, list[Item]] = {}
    for item in items:
        homes.setdefault(_home(store, queue, item), []).append(item)
    for home, found in homes.items():
        there = {n for other in shards if other != home for n in _there(store, other, found)}
        missing = [item for n, item in enumerate(found) if n not in there]
        yield home, missing, [found[n] for n in sorted(there)]


def with_noted(items: Iterable[Item], there: Iterable[Item]) -> list[Item]:
    """Return the items for a shard, and only the names of those that another shard has.

    Those may have run by the next time, so the shard records their names.
    """
    return [*items, *((member, b"") for member, _ in there)]


def _home(store: Store, queue: str, item: Item) -> str:
    id = item[0].partition(b"\x1f")[0].decode(errors="surrogateescape")
    unique = _unique(item[1]) if len(item) == 2 and b'"delayed_unique":' in item[1] else None
    if unique and f'"{ANSWER_HEADER}":'.encode() in item[1]:
        return queue  # answers look for expectations in the first shard
    return store.shards.home(queue, unique.key if unique else id)


def _unique(record: bytes) -> Unique | None:
    try:
        return unique_key(json.loads(record[record.index(b"{", 1) :]))
    except (ValueError, AttributeError, RecursionError):  # damaged, or not sent by this project
        return None


def _there(store: Store, shard: str, items: list[Item]) -> Iterator[int]:
    keys = store.keys(shard)
    hash = keys.messages if len(items[0]) == 2 else keys.dead_messages
    for at in range(0, len(items), LOOK_LIMIT):
        ids = [item[0] for item in items[at : at + LOOK_LIMIT]]
        yield from (at + n for n in store.ask("present", shard, hash=hash, ids=ids))
