from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from kombu_delayed.consumer.cluster_unacked import ClusterQoS
from kombu_delayed.consumer.unacked import ACK, Done
from kombu_delayed.errors import NodeDown


class Stub:
    """A store of which one node is down, and another refuses."""

    def ack(self, queue: str, *_: Any, **__: Any) -> None:
        if queue == "down":
            raise NodeDown
        if queue == "refused":
            raise RuntimeError


def test_what_waits_for_a_node_is_kept_whatever_comes_up_behind_it() -> None:
    """Else it would run again."""
    store: Any = Stub()
    lease: Any = type("", (), {"consumer": "C"})
    qos = ClusterQoS.__new__(ClusterQoS)
    acks = [Done(ACK, queue, n, "") for n, queue in enumerate(("down", "up", "down", "refused"))]
    qos._done, qos._recent = deque(acks), deque()
    qos._freed, qos._freed_lately = deque(), deque()
    with pytest.raises(RuntimeError):
        qos._flush_done(store, lease)
    assert [*qos._done] == [acks[0], acks[2], acks[3]]
