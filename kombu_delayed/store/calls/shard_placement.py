"""Places the shards of a queue evenly among the slots of a Cluster, for any number of shards.

Shards go around the circle of slots, starting at the queue's own slot: first in thirds, then in
sixths, twelfths and so on, each shard between earlier ones. With three times a power of two shards,
each node has equally many if the slots are in equal ranges and the nodes divide them.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import count

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from ...errors import OptionError
from .shards import MARK, is_shard, number_of, queue_of

#: The number of equal ranges of slots, called cells. A node with whole cells gets no shard by
#: chance.
CELLS = 96

#: How far from its place a shard may be, as a share of all slots; less than half a cell.
TOLERANCE = 1 / 200


@lru_cache(maxsize=4096)
def hash_tag(queue: str) -> str:
    """The text in braces in the keys of a queue or of a shard.

    For a shard it is the name and a salt, chosen by trial so that the slot is near its place. In a
    name with a "}" only the part before it would count, so such a name is used without a salt.
    Raises OptionError for a name that begins with "}": its keys would be in many slots.
    """
    if queue.startswith("}"):
        raise OptionError(f"a queue on a Cluster cannot be named {queue!r}: it begins with '}}'")
    if not is_shard(queue) or "}" in queue:
        return queue
    place = _place(queue_of(queue), number_of(queue))
    tags = (f"{queue}{MARK}{salt}" for salt in count())
    return next(tag for tag in tags if _distance(_slot(tag), place) <= TOLERANCE)


def queue_with(tag: str) -> str:
    """The queue or shard whose hash tag this is."""
    shard = tag.rpartition(MARK)[0]
    return shard if shard and hash_tag(shard) == tag else tag


def _place(queue: str, number: int) -> float:
    """The place of a shard on the circle, from 0 to 1: the middle of a cell."""
    cell = (2 * _slot(queue) + 1) * CELLS // (2 * REDIS_CLUSTER_HASH_SLOTS)
    return ((cell + 0.5) / CELLS + (number % 3 + _halvings(number // 3)) / 3) % 1


def _halvings(number: int) -> float:
    """0, 1/2, 1/4, 3/4, 1/8, 5/8 …: van der Corput's sequence."""
    digits = f"{number:b}"
    return int(digits[::-1], 2) / 2 ** len(digits)


def _slot(tag: str) -> int:
    return key_slot(f"{{{tag}}}".encode())


def _distance(slot: int, place: float) -> float:
    apart = abs(slot / REDIS_CLUSTER_HASH_SLOTS - place)
    return min(apart, 1 - apart)
