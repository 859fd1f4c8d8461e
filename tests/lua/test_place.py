"""A bounded number of places, each for a time."""

from __future__ import annotations

import redis

from kombu_delayed.store.scripts import script
from kombu_delayed.store.store import Store


def test_place(store: Store, client: redis.Redis) -> None:
    def take(holder: str, now: int) -> int:
        return int(
            script("place")(
                store.run, places="places", now=str(now), holder=holder, limit=2, kept_ms=60_000
            )
        )

    assert [take("a", 1_000), take("b", 2_000), take("c", 3_000)] == [1, 1, 0]
    assert take("a", 4_000) == 1  # its own, for longer
    assert take("c", 62_000) == 1  # b's time is over
    assert take("d", 63_999) == 0
    assert take("d", 64_000) == 1
    assert client.zrange("places", 0, -1) == [b"c", b"d"]
    assert 0 < client.pttl("places") <= 60_000
