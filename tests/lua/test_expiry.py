"""A ready list that a script recreates expires with its queue, unknown to its caller."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis

from kombu_delayed.inspection.backlog import Backlog, Move
from kombu_delayed.store.store import Store
from tests.kit.state import entry, message, seed

MS = 60_000
BEFORE = {
    "{q}:unacked:A": {"1": "0" + message("a"), "2": "3" + message("b")},
    "{q}:dead": {"d": 700},
    "{q}:dead-messages": {"d": "0" + message("d")},
    "{q}:dead-reasons": {"d": "{}"},
}
MOVES: dict[str, Callable[[Store], object]] = {
    "publish": lambda s: s.publish("q", [entry("c")]),
    "schedule": lambda s: s.schedule("q", [entry("c", 500)]),
    "unique": lambda s: s.schedule_unique("q", entry("c", 500), "key", "refuse"),
    "release": lambda s: s.release("q", "A", [1, 2]),
    "release behind": lambda s: s.release("q", "A", [1, 2], counted=True, behind=True),
    "leave": lambda s: s.leases.leave("q", "A"),
    "reclaim": lambda s: s.leases.reclaim("q", "A"),
    "replay": lambda s: s.dead.replay("q", ["d"]),
}


@pytest.mark.parametrize("expires", [True, False])
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_it_expires(
    move: Callable[[Store], object], expires: bool, store: Store, client: redis.Redis
) -> None:
    seed(client, BEFORE)
    if expires:
        client.set("{q}:expires", MS)
    move(store)
    made = [key for key in client.keys("*") if key.startswith(b"q") or key.endswith(b":wake")]
    assert made
    for key in made:
        assert 0 < client.pttl(key) <= MS if expires else client.pttl(key) == -1


def revise(backlog: Backlog) -> bool:
    return backlog.revise(backlog.get("a")[0], 0, message("new").encode(), 500)


@pytest.mark.parametrize("move", [lambda b: b.reschedule([Move("a", "500")]) == [1], revise])
def test_a_move_in_the_backlog(
    move: Callable[[Backlog], bool], store: Store, client: redis.Redis
) -> None:
    store.schedule("q", [entry("a", 9000)], expires_ms=MS)
    assert move(Backlog(store, "q"))
    assert 0 < client.pttl("q") <= MS


@pytest.mark.parametrize("other", ["host:1:aaaaaaaa-1000", "of version 0.1.0"])
def test_the_lease_of_a_dead_consumer_expires_when_another_one_leaves(
    other: str, store: Store, client: redis.Redis
) -> None:
    """One of version 0.1.0 may live, and cannot extend the expiry."""
    for name in (other, "host:2:bbbbbbbb-1000"):
        store.deliver("q", name, 1, 1, lease_ms=1000, expires_ms=MS)
    store.leases.leave("q", "host:2:bbbbbbbb-1000")
    left_ms = client.pttl("{q}:consumers")
    assert left_ms == -1 if other == "of version 0.1.0" else 0 < left_ms <= MS + 10_000
