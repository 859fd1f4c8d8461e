"""What is urgent does not wait until all that was due before it has become ready."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from kombu_delayed.message.ticket import Gate, Ticket, put_ticket
from kombu_delayed.store.keys import QueueKeys
from kombu_delayed.store.store import Entry, Store
from tests.kit.restoring import kept, restore
from tests.kit.state import message

URGENT = QueueKeys("q").urgent
MANY = 2_000


@pytest.fixture(autouse=True)
def _time_stands_still(store: Store) -> None:
    store.now = "1000"


def schedule(store: Store, step: int, due_ms: int, *names: str) -> None:
    store.schedule("q", [Entry(name, step, message(name), str(due_ms)) for name in names])


def fill(store: Store, step: int, count: int = MANY, first_ms: int = 2000) -> None:
    names = [f"{step}.{n}" for n in range(count)]
    store.schedule(
        "q", [Entry(name, step, message(name), str(first_ms + n)) for n, name in enumerate(names)]
    )


def take(store: Store, want: int = 10, **options: Any) -> list[str]:
    """Deliver once; returns the bodies, in order."""
    take.tag += want  # type: ignore[attr-defined]
    answer = store.deliver("q", "A", want, take.tag, lease_ms=30_000, **options)  # type: ignore[attr-defined]
    assert answer is not None
    return [record.decode().split('"body":"')[1].split('"')[0] for record in answer.records]


take.tag = 0  # type: ignore[attr-defined]


def take_all(store: Store) -> list[str]:
    found: list[str] = []
    while bodies := take(store, 250):
        found += bodies
    return found


@pytest.mark.parametrize("low", [3, 9])
def test_an_urgent_one_behind_many(store: Store, low: int) -> None:
    fill(store, low)
    schedule(store, 0, 5000, "urgent")
    store.now = "6000"
    assert "urgent" in take(store)


def test_an_urgent_one_that_was_parked(store: Store) -> None:
    fill(store, 9)
    store.publish("q", [Entry("urgent", 0, message("urgent"))])
    assert take(store) == ["urgent"]
    store.park("q", "A", [(take.tag, "urgent", 5000)])  # type: ignore[attr-defined]
    store.now = "6000"
    assert "urgent" in take(store)


def test_an_urgent_one_of_a_backup(store: Store) -> None:
    fill(store, 9)
    assert restore(store, [("urgent", kept(message("urgent"), 5000))]) == (1, 0)
    store.now = "6000"
    assert "urgent" in take(store)


def test_each_step_goes_before_the_less_urgent_ones(store: Store) -> None:
    fill(store, 9)
    fill(store, 6)
    fill(store, 3)
    schedule(store, 0, 5000, "urgent")
    store.now = "6000"
    assert take(store, 3)[0] == "urgent"
    steps = [body[0] for body in take_all(store)]
    assert steps.index("9") > MANY - 300, "hardly any 9 runs before the last 3"


def test_within_a_step_they_come_by_due_time(store: Store) -> None:
    fill(store, 9)
    fill(store, 0, first_ms=2500)
    store.now = "9000"
    found = take_all(store)
    for step in "09":
        assert [body for body in found if body[0] == step] == [f"{step}.{n}" for n in range(MANY)]
    assert found[:MANY] == [f"0.{n}" for n in range(MANY)]


def test_what_was_there_before_the_less_urgent_ones_comes_by_due_time(store: Store) -> None:
    fill(store, 0, 600)
    fill(store, 9, 600, first_ms=2000)
    schedule(store, 0, 5000, "urgent")
    store.now = "9000"
    found = take_all(store)
    assert found.index("urgent") < 300
    assert sorted(found) == sorted([f"{s}.{n}" for s in (0, 9) for n in range(600)] + ["urgent"])


def test_one_priority_has_no_other_key(store: Store, client: redis.Redis) -> None:
    fill(store, 0, 300)
    assert not client.exists(URGENT)


def test_nothing_is_left_of_it(store: Store, client: redis.Redis) -> None:
    fill(store, 9, 600)
    fill(store, 0, 600)
    assert client.zcard(URGENT) == 601
    store.now = "9000"
    take_all(store)
    assert not client.exists(URGENT)


def test_what_became_ready_in_due_order_is_forgotten(store: Store, client: redis.Redis) -> None:
    fill(store, 9, 10, first_ms=90_000)
    fill(store, 0, 10)
    store.now = "9000"
    take(store)
    assert client.zcard(URGENT) == 1


def test_one_that_was_cancelled_is_forgotten(store: Store, client: redis.Redis) -> None:
    fill(store, 9, 10, first_ms=90_000)
    schedule(store, 0, 5000, "a", "b")
    move, given = store.cancel_call("q", ["a"])
    move(store.run, **given)
    store.now = "6000"
    assert take(store) == ["b"]
    assert client.zcard(URGENT) == 1


def test_one_that_was_given_a_later_time_is_not_early(store: Store) -> None:
    fill(store, 9)
    schedule(store, 0, 5000, "a")
    reschedule(store, "a", 8000)
    store.now = "7000"
    assert "a" not in take_all(store)
    store.now = "8000"
    assert take(store) == ["a"]


def test_one_that_was_given_another_time_is_still_urgent(store: Store) -> None:
    schedule(store, 0, 90_000, "a")
    fill(store, 9)
    reschedule(store, "a", 8000)
    store.now = "9000"
    assert "a" in take(store)


def reschedule(store: Store, id: str, due_ms: int) -> None:
    store.ask("reschedule", "q", whole="1", entries=[id, str(due_ms), ""])


@pytest.mark.parametrize(
    "score", [5000, 1500, 5000 + 3 * 2**48, 99_000], ids=["true", "early", "other step", "late"]
)
def test_a_stale_entry_is_harmless(store: Store, client: redis.Redis, score: int) -> None:
    """As a worker of the previous version leaves them, which knows nothing of this set."""
    fill(store, 9)
    schedule(store, 0, 5000, "a")
    client.zadd(URGENT, {"a": score, "gone": 1500})
    store.now = "4000"
    assert "a" not in take(store)
    store.now = "9000"
    found = take_all(store)
    assert found.count("a") == 1
    assert len(found) == MANY - 10 + 1
    assert not client.exists(URGENT)


def test_what_another_worker_has_made_ready_is_not_made_ready_twice(
    store: Store, client: redis.Redis
) -> None:
    fill(store, 9)
    schedule(store, 0, 5000, "a")
    stale = client.zrange(URGENT, 0, -1, withscores=True)
    store.now = "6000"
    assert take(store)[0] == "a"
    client.zadd(URGENT, dict(stale))
    assert "a" not in take_all(store)


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
    """One from the midst of what is overdue, which is brought from both ends."""
    low = [Entry(f"9.{n}", 9, ticket(f"9.{n}"), str(2000 + n)) for n in range(MANY)]
    store.schedule("q", [*low, Entry("urgent", 0, ticket("urgent"), str(3000))])
    store.now = "9000"
    take(store, gate=GATE)
    has_come = client.zscore("{q}:delayed:waiting", "urgent") is not None
    assert has_come or not client.hexists("{q}:messages", "urgent")
    assert client.zcard(URGENT) == 1


def test_purged(store: Store, client: redis.Redis) -> None:
    fill(store, 9, 10)
    fill(store, 0, 10)
    store.purge("q")
    assert not client.exists(URGENT)


def test_due_times_that_never_come(store: Store) -> None:
    fill(store, 9, 10)
    schedule(store, 0, 2**53, "never")
    store.now = "9000"
    assert len(take_all(store)) == 10
