"""Urgent messages do not wait until all messages due before them are ready."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from kombu_delayed.inspection.backlog import Backlog, Move
from kombu_delayed.message.ticket import Gate, Ticket, put_ticket
from kombu_delayed.store.keys import QueueKeys
from kombu_delayed.store.store import Entry, Store
from tests.kit.claims import bodies, deliver
from tests.kit.restoring import kept, restore
from tests.kit.state import entry, message

URGENT = QueueKeys("q").urgent
MANY = 2_000


def fill(store: Store, step: int, count: int = MANY, first_ms: int = 2000) -> None:
    store.schedule("q", [entry(f"{step}.{n}", first_ms + n, step) for n in range(count)])


def take(store: Store, want: int = 10, **options: Any) -> list[str]:
    """Deliver once to a consumer that holds nothing; returns the bodies, in order."""
    store.client.delete("{q}:unacked:A")
    return bodies(deliver(store, want=want, **options))


def take_all(store: Store) -> list[str]:
    found: list[str] = []
    while bodies := take(store, 250):
        found += bodies
    return found


@pytest.mark.parametrize(("low", "way"), [(3, "sent"), (9, "sent"), (9, "parked"), (9, "restored")])
def test_an_urgent_one_behind_many(low: int, way: str, store: Store) -> None:
    fill(store, low)
    if way == "sent":
        store.schedule("q", [entry("urgent", 5000)])
    elif way == "parked":
        store.publish("q", [entry("urgent")])
        assert take(store) == ["urgent"]
        store.park("q", "A", [(1, "urgent", 5000)])
    else:
        assert restore(store, [("urgent", kept(message("urgent"), 5000))]) == (1, 0)
    store.now = "6000"
    assert "urgent" in take(store)


def test_within_a_step_they_come_by_due_time(store: Store) -> None:
    fill(store, 9)
    fill(store, 0, first_ms=2500)
    store.now = "9000"
    found = take_all(store)
    for step in "09":
        assert [body for body in found if body[0] == step] == [f"{step}.{n}" for n in range(MANY)]
    assert found[:MANY] == [f"0.{n}" for n in range(MANY)]


def test_nothing_is_left_of_it(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("x", 1500)])
    assert not client.exists(URGENT), "one priority needs none"
    fill(store, 9, 600)
    fill(store, 0, 600)
    assert client.zcard(URGENT) == 601
    store.now = "9000"
    take_all(store)
    assert not client.exists(URGENT)
    fill(store, 9, 10, first_ms=10_000)
    fill(store, 0, 10, first_ms=10_000)
    store.purge("q")
    assert not client.exists(URGENT)


def test_one_that_was_given_a_later_time_is_not_early(store: Store) -> None:
    fill(store, 9)
    store.schedule("q", [entry("a", 5000)])
    Backlog(store, "q").reschedule([Move("a", "8000")])
    store.now = "7000"
    assert "a" not in take_all(store)
    store.now = "8000"
    assert take(store) == ["a"]


def test_one_that_was_given_another_time_is_still_urgent(store: Store) -> None:
    store.schedule("q", [entry("a", 90_000)])
    fill(store, 9)
    Backlog(store, "q").reschedule([Move("a", "8000")])
    store.now = "9000"
    assert "a" in take(store)


@pytest.mark.parametrize(
    "score", [5000, 1500, 5000 + 3 * 2**48, 99_000], ids=["true", "early", "other step", "late"]
)
def test_a_stale_entry_is_harmless(store: Store, client: redis.Redis, score: int) -> None:
    """Workers of the previous version leave such entries, as they do not know this set."""
    fill(store, 9)
    store.schedule("q", [entry("a", 5000)])
    client.zadd(URGENT, {"a": score, "gone": 1500})
    store.now = "4000"
    assert "a" not in take(store)
    store.now = "9000"
    found = take_all(store)
    assert found.count("a") == 1
    assert len(found) == MANY - 10 + 1
    assert not client.exists(URGENT)


def test_work_is_bounded(store: Store, client: redis.Redis) -> None:
    fill(store, 9)
    fill(store, 0)
    store.now = "9000"
    take(store, 0, promotions=100)
    assert client.llen("q") + client.llen("q\x06\x169") <= 150


GATE = Gate("v", ())


def with_ticket(name: str) -> str:
    return put_ticket(message(name), Ticket("k").text("v", name))


@pytest.mark.parametrize("ticket", [message, with_ticket], ids=["no ticket", "ticket"])
def test_at_a_gate(store: Store, client: redis.Redis, ticket: Callable[[str], str]) -> None:
    """An urgent message from the middle of the overdue ones, which are promoted from both ends."""
    low = [Entry(f"9.{n}", 9, ticket(f"9.{n}"), str(2000 + n)) for n in range(MANY)]
    store.schedule("q", [*low, Entry("urgent", 0, ticket("urgent"), str(3000))])
    store.now = "9000"
    take(store, gate=GATE)
    has_come = client.zscore("{q}:delayed:waiting", "urgent") is not None
    assert has_come or not client.hexists("{q}:messages", "urgent")
    assert client.zcard(URGENT) == 1


def test_due_times_that_never_come(store: Store) -> None:
    fill(store, 9, 10)
    store.schedule("q", [entry("never", 2**53)])
    store.now = "9000"
    assert len(take_all(store)) == 10
