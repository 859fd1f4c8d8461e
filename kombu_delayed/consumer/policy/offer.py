"""What a producer says of the policies of a queue before any consumer has said something."""

from __future__ import annotations

from kombu_delayed.store.policies.declared import PolicyRecord
from kombu_delayed.store.store import Store

from ..lease.consumer_id import consumer_id
from .decisions import Rules


def offer(rules: Rules, queue: str, store: Store) -> None:
    """Let the policies of this program hold for a queue for which nothing is declared.

    Later, its consumers decide. What the server refuses, a consumer declares. Raises connection
    errors.
    """
    if not (text := rules.offered(queue)):
        return
    shards, policies, by = store.shards.all(queue), store.policies, consumer_id()
    found = zip(shards, policies.read_each(shards), strict=True)
    empty = PolicyRecord()
    store.together(
        [policies.declare_call(shard, text, by, empty) for shard, known in found if known == empty]
    )
