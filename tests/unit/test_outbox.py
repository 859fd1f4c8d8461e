from __future__ import annotations

from typing import Any

import pytest

from kombu_delayed.consumer.outbox import ACK, Done, Outbox
from kombu_delayed.errors import NodeDown
from kombu_delayed.store.cluster_store import ClusterStore


class Stub:
    """A store of which one node is down, and another refuses."""

    errors_of_one_queue = ClusterStore.errors_of_one_queue
    run = type("", (), {"generation": 0})

    def ack(self, queue: str, *_: Any, **__: Any) -> None:
        if queue == "down":
            raise NodeDown
        if queue == "refused":
            raise RuntimeError


def test_what_waits_for_a_node_is_kept_whatever_comes_up_behind_it() -> None:
    """Else it would run again."""
    store: Any = Stub()
    lease: Any = type("", (), {"consumer": "C"})
    outbox = Outbox()
    acks = [Done(ACK, queue, n, "") for n, queue in enumerate(("down", "up", "down", "refused"))]
    outbox.done.extend(acks)
    with pytest.raises(RuntimeError):
        outbox.flush(store, lease)
    assert [*outbox.done] == [acks[0], acks[2], acks[3]]
