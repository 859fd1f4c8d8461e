"""What a program that sends declares: its policies, where nobody has ever declared any."""

from __future__ import annotations

from redis import ResponseError

from kombu_delayed.connection.native import get_logger
from kombu_delayed.errors import UNREACHABLE
from kombu_delayed.store.policies.declared import PolicyRecord
from kombu_delayed.store.store import Store

from ..lease.consumer_id import consumer_id
from .decisions import Rules

logger = get_logger(__name__)


def offer(rules: Rules, store: Store, queue: str) -> bool:
    """Declare them for a queue and its shards; returns whether the server could be told.

    What was declared, or dropped, stays as it is.
    """
    text = rules.offered(queue)
    if not text:
        return True
    try:
        for shard in store.shards.all(queue):
            call = store.policies.declare_call(shard, text, consumer_id(), PolicyRecord())
            store.post(*call, on_error=lambda: None)  # a worker declares it when it starts
    except UNREACHABLE:
        return False
    except ResponseError as error:
        logger.warning("The policies of queue %r are not declared: %s", queue, error)
    return True
