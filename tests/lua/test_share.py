"""Slots of a global limit are lent to consumers, which report all they have, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import redis

from kombu_delayed.message.ticket import Gate, LimitNumbers
from kombu_delayed.store.global_limits import GlobalLimits, Lack, Shared, pool_of, shared
from kombu_delayed.store.store import Store

LEASE_MS = 10_000
GATE = Gate("v", (LimitNumbers("all", 3, is_global=True),))
POOL = pool_of("all")
ALL, ADA = "all:", "all:ada"


class Consumer:
    """Reports its slots, as a worker does."""

    def __init__(self, store: Store, name: str) -> None:
        self.store, self.name = store, name
        self.number = 0
        self.leased = False

    def call(self, number: int, held: Mapping[str, int], wanted: Any, most: int = 100) -> Any:
        move, given = GlobalLimits(self.store).share_call(
            POOL,
            self.name,
            number,
            GATE.global_limits["all"],
            held,
            wanted,
            most=most,
            lease_ms=LEASE_MS,
            leased=self.leased,
        )
        return shared(move(self.store.run, **given))

    def share(
        self,
        held: Mapping[str, int],
        wanted: Mapping[str, Sequence[Lack]] | None = None,
        **more: Any,
    ) -> Shared:
        self.number += 1
        answer = self.call(self.number, held, wanted or {}, **more)
        assert answer is not None
        self.leased = True
        return answer


@pytest.fixture
def a(store: Store) -> Consumer:
    return Consumer(store, "A")


@pytest.fixture
def b(store: Store) -> Consumer:
    return Consumer(store, "B")


def in_use(client: redis.Redis, slot: str = ALL) -> int:
    return int(client.hget(f"{{{POOL}}}:gate:slots", slot) or 0)


def wants(count: int, slot: str = ALL, cost: int = 1) -> list[Lack]:
    return [Lack(slot, cost, count)]


def test_never_more_than_there_are(client: redis.Redis, a: Consumer, b: Consumer) -> None:
    assert a.share({}, {"q": wants(2)}).granted == {("q", ALL): 2}
    assert b.share({}, {"r": wants(2)}).granted == {("r", ALL): 1}
    assert b.share({ALL: 1}, {"r": wants(2)}).granted == {}
    assert in_use(client) == 3
    assert a.share({ALL: 1}).called == ["r"]
    assert b.share({ALL: 1}, {"r": wants(2)}).granted == {("r", ALL): 1}
    assert in_use(client) == 3


def test_each_key_has_its_own(client: redis.Redis, a: Consumer) -> None:
    assert a.share({}, {"q": wants(5) + wants(5, ADA)}).granted == {("q", ALL): 3, ("q", ADA): 3}
    a.share({ADA: 3})
    assert (in_use(client), in_use(client, ADA)) == (0, 3)


def test_no_more_than_the_consumer_has_room_for(a: Consumer) -> None:
    answer = a.share({}, {"q": wants(2), "r": wants(2)}, most=2)
    assert sum(answer.granted.values()) == 2


def test_slots_of_a_lost_answer_come_back(client: redis.Redis, a: Consumer) -> None:
    a.share({}, {"q": wants(2)})
    a.share({})
    assert in_use(client) == 0


def test_an_older_call_changes_nothing(client: redis.Redis, a: Consumer) -> None:
    a.share({}, {"q": wants(2)})
    a.share({ALL: 2})
    for number in (1, 2):
        assert a.call(number, {}, {"q": wants(1)}) == Shared()
    assert in_use(client) == 2


def test_a_server_without_data_learns_what_is_taken(
    client: redis.Redis, store: Store, a: Consumer, b: Consumer
) -> None:
    a.share({}, {"q": wants(2)})
    client.flushall()
    assert a.call(9, {ALL: 2}, {}) is None
    a.leased, a.number = False, 9
    a.share({ALL: 2})
    assert b.share({}, {"r": wants(3)}).granted == {("r", ALL): 1}


def test_the_dead_give_theirs_back(
    client: redis.Redis, store: Store, a: Consumer, b: Consumer
) -> None:
    a.share({}, {"q": wants(3)})
    assert store.leases.renew(POOL, "B", LEASE_MS) is None
    b.share({})
    store.now = str(1000 + LEASE_MS + 1)
    assert store.leases.renew(POOL, "B", LEASE_MS) == ["A"]
    store.leases.reclaim(POOL, "A")
    assert in_use(client) == 0
    assert a.call(a.number + 1, {ALL: 3}, {}) is None
    assert store.leases.was_reclaimed(POOL, "A")


def test_what_runs_on_stays_when_its_consumer_leaves(
    client: redis.Redis, store: Store, a: Consumer
) -> None:
    a.share({}, {"q": wants(1) + wants(1, ADA)})
    store.leases.leave(POOL, "A", ["", ADA])
    assert (in_use(client), in_use(client, ADA)) == (0, 1)
    assert [name for name, _, _ in store.leases.consumers(POOL)] == ["A"]
    store.leases.leave(POOL, "A")
    assert in_use(client, ADA) == 0
    assert store.leases.consumers(POOL) == []


def test_queues_take_turns(store: Store, a: Consumer, b: Consumer) -> None:
    """A consumer whose tasks end all the time does not keep the slots for itself."""
    a.share({}, {"q": wants(9)})
    b.share({}, {"r": wants(9)})
    held = {"q": 3, "r": 0}
    for _ in range(4):
        answer = a.share({ALL: held["q"] - 1}, {"q": wants(9)})
        held["q"] += len(answer.granted) - 1
        if "r" in answer.called:
            got = b.share({ALL: held["r"]}, {"r": wants(9)}).granted.get(("r", ALL), 0)
            held["r"] += got
    assert held["r"] >= 1


def test_who_does_not_come_keeps_nobody_waiting(store: Store, a: Consumer, b: Consumer) -> None:
    a.share({}, {"q": wants(3)})
    b.share({}, {"r": wants(1)})
    assert a.share({ALL: 2}, {"q": wants(1)}) == Shared({}, ["r"])
    store.now = "1050"
    assert a.share({ALL: 2}, {"q": wants(1)}) == Shared()
    store.now = "1100"
    assert a.share({ALL: 2}, {"q": wants(1)}).granted == {("q", ALL): 1}


def test_a_clock_that_was_set_back_keeps_nobody_waiting(
    store: Store, a: Consumer, b: Consumer
) -> None:
    a.share({}, {"q": wants(3)})
    b.share({}, {"r": wants(1)})
    assert a.share({ALL: 2}, {"q": wants(1)}).called == ["r"]
    store.now = "500"
    assert a.share({ALL: 2}, {"q": wants(1)}).granted == {("q", ALL): 1}


def test_nobody_overtakes_a_heavy_message(a: Consumer, b: Consumer) -> None:
    a.share({}, {"q": wants(3)})
    assert b.share({}, {"r": wants(1, cost=2)}).granted == {}
    assert a.share({ALL: 2}, {"q": wants(1)}).granted == {}
    assert a.share({ALL: 1}, {"q": wants(1)}) == Shared({}, ["r"])
    assert b.share({}, {"r": wants(1, cost=2)}).granted == {("r", ALL): 1}


def test_a_message_that_is_heavier_than_the_limit_runs_alone(
    client: redis.Redis, a: Consumer
) -> None:
    assert a.share({}, {"q": wants(2, cost=7)}).granted == {("q", ALL): 1}
    assert in_use(client) == 7
    assert a.share({}, {"q": wants(1)}).granted == {("q", ALL): 1}


def test_a_queue_with_many_shards_has_no_more_turns(a: Consumer, b: Consumer) -> None:
    shards = {name: wants(9) for name in ("q", "q\x1f1", "q\x1f2")}
    assert sum(a.share({}, shards, most=3).granted.values()) == 3
    b.share({}, {"r": wants(9)})
    held = {"a": 3, "b": 0}
    for _ in range(6):  # one task of each ends, if it has any
        held["a"] -= 1
        answer = a.share({ALL: held["a"]}, shards)
        held["a"] += sum(answer.granted.values())
        held["b"] -= min(held["b"], 1)
        held["b"] += sum(b.share({ALL: held["b"]}, {"r": wants(9)}).granted.values())
        assert held["a"] + held["b"] <= 3
    assert held["b"] >= 1
