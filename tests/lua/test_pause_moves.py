"""A paused queue: no consumer gets its messages, nothing moves, and nothing counts as late."""

from __future__ import annotations

import pytest
import redis

from kombu_delayed.message.ticket import OPEN_GATE, Gate
from kombu_delayed.store.claimable import Delivered
from kombu_delayed.store.store import Store
from tests.kit.claims import bodies, deliver
from tests.kit.state import entry, seed, state

GATES = [None, Gate("v"), OPEN_GATE]


@pytest.fixture
def busy(store: Store) -> Store:
    """Two messages are ready, one is due, and one is not."""
    store.publish("q", [entry("a"), entry("b")])
    store.schedule("q", [entry("c", 2_000), entry("d", 900_000)])
    store.now = "3000"
    return store


@pytest.mark.parametrize("gate", GATES)
def test_nothing_is_claimed_until_it_is_resumed(
    gate: Gate | None, busy: Store, client: redis.Redis
) -> None:
    busy.pauses.pause("q", "ann", "why")
    before = state(client)
    for options in ({}, {"waits": False}, {"listens": True}):
        found = deliver(busy, want=9, gate=gate, **options)
        assert found._replace(gated=False) == Delivered(3000, 0, False, 1, [], paused=True)
    after = state(client)
    for name in ("{q}:wake", "{q}:consumers"):
        before.pop(name, None)
        after.pop(name, None)
    assert after == before
    busy.now = "60000"
    assert busy.pauses.resume("q")
    assert state(client)["{q}:wake"]["now"] == 0  # type: ignore[index]
    if gate is OPEN_GATE:
        return  # only messages that wait at a gate leave through it
    found = deliver(busy, want=9, gate=gate)
    assert sorted(bodies(found)) == ["a", "b", "c"]
    assert (found.paused, found.resumed_ms, found.next_due_ms) == (False, 60_000, 900_000)
    assert not busy.pauses.resume("q")


@pytest.mark.parametrize("gate", GATES)
def test_a_clock_that_is_set_back_pauses_nothing(gate: Gate | None, busy: Store) -> None:
    busy.pauses.pause("q", "ann", "")
    busy.now = "3600000"
    assert busy.pauses.resume("q")
    busy.now = "3000"
    assert not deliver(busy, want=9, gate=gate).paused
    assert busy.pauses.of("q") is None
    assert busy.pauses.resumed_ms("q") == 3_600_000
    assert not busy.metrics("q").paused


@pytest.mark.parametrize("gate", GATES[:2])
def test_it_ends_by_itself(gate: Gate | None, busy: Store, client: redis.Redis) -> None:
    """Its note has an expiry only then, as a server may evict keys with an expiry."""
    busy.pauses.pause("q", "ann", "", 5_000)
    found = deliver(busy, gate=gate)
    assert (found.records, found.next_due_ms) == ([], 8_000)
    busy.now = "7999"
    assert deliver(busy, gate=gate).paused
    assert client.pttl("{q}:paused") == -1
    busy.now = "8000"
    found = deliver(busy, want=9, gate=gate)
    assert (len(found.records), found.resumed_ms) == (3, 8_000)
    assert client.pttl("{q}:paused") > 0  # type: ignore[operator]


def test_nothing_is_late(busy: Store) -> None:
    assert busy.metrics("q").oldest_due_seconds == 1
    busy.pauses.pause("q", "ann", "", 5_000)
    busy.now = "7000"
    found = busy.metrics("q")
    assert (found.paused, found.due, found.ready) == (True, 1, 2)
    assert (found.oldest_due_seconds, found.next_due_seconds) == (0, 893)
    busy.now = "9000"
    found = busy.metrics("q")
    assert (found.paused, found.oldest_due_seconds) == (False, 1)


def test_who_has_paused_it(store: Store, client: redis.Redis) -> None:
    assert store.pauses.of("q") is None
    store.pauses.pause("q", "ann", "one")
    store.now = "2000"
    store.pauses.pause("q", "bob", "two {1} %d 7", 500)  # replaces the note; the pause continues
    assert store.pauses.of("q") == (1000, 2500, "bob", "two {1} %d 7")
    store.now = "2400"
    assert client.pttl("{q}:paused") == -1
    assert store.pauses.resume("q")
    assert client.pttl("{q}:paused") > 0  # type: ignore[operator]
    assert (store.pauses.of("q"), store.pauses.resumed_ms("q")) == (None, 2400)
    seed(client, {"{q}:paused": "1 0 by hand"})
    assert store.pauses.of("q") == (1, 0, "", "by hand")
