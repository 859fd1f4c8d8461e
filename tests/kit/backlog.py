"""The partitions of a backlog, read and checked."""

from __future__ import annotations

import re
from itertools import pairwise

import redis

from kombu_delayed.store.keys import QueueKeys
from kombu_delayed.store.store import Store
from tests.kit.state import all_keys

#: A partition: its lower bound, and its members with their due times in order.
Partition = tuple[int, list[tuple[str, int]]]


def partitions(client: redis.Redis, queue: str = "q") -> list[Partition]:
    keys = QueueKeys(queue)
    found = []
    for name, bound in client.zrange(keys.partitions, 0, -1, withscores=True):
        own = client.zrange(keys.delayed + name.decode(), 0, -1, withscores=True)
        found.append((int(bound), [(member.decode(), int(due)) for member, due in own]))
    return found


def due_times(client: redis.Redis, queue: str = "q") -> list[list[int]]:
    return [[due for _, due in own] for _, own in partitions(client, queue)]


def records(client: redis.Redis, queue: str = "q", of: str = "messages") -> dict[str, str]:
    """Priority step + due time + message of all delayed messages, from all buckets.

    `of` may name another key that is spread over buckets.
    """
    key = f"{{{queue}}}:{of}"
    found: dict[str, str] = {}
    buckets = [each for each in all_keys(client) if re.fullmatch(rf"{re.escape(key)}(:\d+)?", each)]
    for name in buckets:
        raw = client.hgetall(name)
        if any(b"\1" in record for record in raw.values()):  # packed, as in a large hash
            store, ids = Store(client), [*raw]
            raw = dict(zip(ids, store.fields(queue, key, ids), strict=True))
            store.hang_up()
        part = {id.decode(): record.decode() for id, record in raw.items()}
        assert not found.keys() & part.keys(), "two buckets have the same id"
        found |= part
    return found


def check_backlog(client: redis.Redis, queue: str = "q") -> dict[str, int]:
    """Check the partition index and return all members with their due times."""
    keys = QueueKeys(queue)
    found = partitions(client, queue)
    assert all(own for _, own in found), "a partition is empty"
    bounds = [bound for bound, _ in found]
    assert len(set(bounds)) == len(bounds), "two partitions have one bound"
    for (_, own), (bound, _) in pairwise(found):
        assert own[-1][1] < bound, "a member belongs into the next partition"
    for bound, own in found[1:]:
        assert bound <= own[0][1], "a member belongs into the partition before"
    names = {keys.delayed + name.decode() for name in client.zrange(keys.partitions, 0, -1)}
    assert {key for key in all_keys(client) if key.startswith(keys.delayed)} == names
    members = {member: due for _, own in found for member, due in own}
    assert sum(len(own) for _, own in found) == len(members), "a member is in two partitions"
    assert records(client, queue).keys() == members.keys()
    return members
