"""The placement of shards on a Cluster whose slots are in equal ranges."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
from redis.crc import key_slot

from kombu_delayed.store.calls.shard_placement import hash_tag, queue_with
from kombu_delayed.store.calls.shards import shard_name

NAMES = [f"queue{n}" for n in range(190)] + [f"ü {n}{{" for n in range(10)]
SLOTS = 16_384


def counts(queue: str, shards: int, nodes: int) -> list[int]:
    """Shards of each node."""
    ends = [round(SLOTS * (n + 1) / nodes) for n in range(nodes)]
    found = Counter(
        next(n for n, end in enumerate(ends) if slot_of(shard_name(queue, number)) < end)
        for number in range(shards)
    )
    return [found[n] for n in range(nodes)]


@cache
def slot_of(shard: str) -> int:
    return key_slot(f"{{{hash_tag(shard)}}}:wake".encode())


@pytest.mark.parametrize("nodes", [2, 3, 4, 6])
@pytest.mark.parametrize("shards", [3, 6, 12, 24])
def test_nodes_have_equally_many(shards: int, nodes: int) -> None:
    """They differ by one at most if the shards cannot be divided evenly."""
    most_apart = 1 if shards % nodes else 0
    for name in NAMES:
        found = counts(name, shards, nodes)
        assert max(found) - min(found) == most_apart, name


def test_a_name_has_its_slot_for_good() -> None:
    """Other processes and other versions must find it there."""
    assert [slot_of(shard_name("emails", n)) for n in range(6)] == [
        3728,
        9105,
        14661,
        6476,
        11835,
        966,
    ]


def test_who_reads_keys_finds_the_shard() -> None:
    for name in NAMES:
        for number in range(12):
            shard = shard_name(name, number)
            assert queue_with(hash_tag(shard)) == shard


def test_a_name_that_would_hide_the_salt_has_none() -> None:
    assert hash_tag("a}b\x1f3") == "a}b\x1f3"
