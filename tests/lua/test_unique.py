"""One delayed message for each unique key."""

from __future__ import annotations

import pytest
import redis

from kombu_delayed.inspection.backlog import Backlog, Move
from kombu_delayed.store.store import Entry, Store
from tests.kit.backlog import check_backlog
from tests.kit.state import entry, message, promoted, state

A, B = message("a"), message("b")


@pytest.fixture(autouse=True)
def _time_stands_still(store: Store) -> None:
    store.now = "1000"


def send(store: Store, sent: Entry, conflict: str = "refuse", key: str = "k") -> tuple[str, str]:
    return store.schedule_unique("q", sent, key, conflict)


def test_the_first_one_is_stored(store: Store, client: redis.Redis) -> None:
    assert send(store, entry("a", 2000, step=3)) == ("stored", "")
    after = state(client)
    assert check_backlog(client) == {"a": 2000}
    assert after["{q}:messages"] == {"a": "3" + A}
    assert after["{q}:wake"] == {"due": 2000}
    assert after["{q}:unique"] == {"k": "a"}
    assert after["{q}:unique-due"] == {"k": 2000}


def test_one_that_is_pushed_to_an_earlier_time_wakes_a_consumer(
    store: Store, client: redis.Redis
) -> None:
    send(store, entry("a", 3000))
    assert send(store, entry("b", 2000), "debounce") == ("pushed", "a")
    assert state(client)["{q}:wake"] == {"due": 2000}


@pytest.mark.parametrize(
    ("conflict", "answer", "left", "text"),
    [
        ("refuse", ("refused", "a"), {"a": 2000}, {"a": "0" + A}),
        ("replace", ("replaced", "a"), {"b": 3000}, {"b": "0" + B}),
        ("debounce", ("pushed", "a"), {"a": 3000}, {"a": "0" + A}),
    ],
)
def test_a_second_one(
    conflict: str,
    answer: tuple[str, str],
    left: dict[str, int],
    text: dict[str, str],
    store: Store,
    client: redis.Redis,
) -> None:
    send(store, entry("a", 2000))
    assert send(store, entry("b", 3000), conflict) == answer
    assert check_backlog(client) == left
    after = state(client)
    assert after["{q}:messages"] == text
    (member,) = left
    assert after["{q}:unique"] == {"k": member}
    assert after["{q}:unique-due"] == {"k": left[member]}


@pytest.mark.parametrize(
    ("conflict", "ready"),
    [("refuse", None), ("replace", [B]), ("debounce", [promoted(A, 900)])],
)
def test_a_second_one_that_is_due(
    conflict: str, ready: list[str] | None, store: Store, client: redis.Redis
) -> None:
    send(store, entry("a", 2000))
    send(store, entry("b", 900), conflict)
    after = state(client)
    assert after.get("q") == ready
    assert ("{q}:unique" in after) == (ready is None)
    assert check_backlog(client) == ({"a": 2000} if ready is None else {})


@pytest.mark.parametrize("conflict", ["refuse", "replace", "debounce"])
def test_other_keys_are_no_matter(conflict: str, store: Store, client: redis.Redis) -> None:
    send(store, entry("a", 2000))
    assert send(store, entry("b", 3000), conflict, key="l") == ("stored", "")
    assert check_backlog(client) == {"a": 2000, "b": 3000}


@pytest.mark.parametrize("conflict", ["refuse", "replace", "debounce"])
def test_the_same_one_sent_again(conflict: str, store: Store, client: redis.Redis) -> None:
    for _ in range(2):
        assert send(store, entry("a", 2000), conflict) == ("stored", "")
    assert check_backlog(client) == {"a": 2000}


@pytest.mark.parametrize("way", ["delivered", "cancelled", "purged"])
def test_a_second_one_when_the_first_has_left(way: str, store: Store, client: redis.Redis) -> None:
    send(store, entry("a", 2000))
    if way == "delivered":
        store.now = "2000"
        store.deliver("q", "A", 1, 1, lease_ms=100)
    elif way == "cancelled":
        Backlog(store, "q").cancel(["a"])
    else:
        store.purge("q")
    assert send(store, entry("b", 3000)) == ("stored", "")
    assert check_backlog(client) == {"b": 3000}


def test_one_that_was_rescheduled_still_counts(store: Store) -> None:
    send(store, entry("a", 2000))
    Backlog(store, "q").reschedule([Move("a", "9000")])
    store.now = "5000"
    assert send(store, entry("b", 6000)) == ("refused", "a")


@pytest.mark.parametrize("conflict", ["refuse", "replace", "debounce"])
def test_a_retry_is_held_against_nobody(conflict: str, store: Store, client: redis.Redis) -> None:
    send(store, entry("a", 2000))
    store.now = "2000"
    store.deliver("q", "A", 1, 1, lease_ms=100)
    assert send(store, entry("a", 9000, body="retry"), "retry") == ("stored", "")
    assert send(store, entry("b", 5000), conflict) == ("stored", "")
    assert check_backlog(client) == {"a": 9000, "b": 5000}
    assert send(store, entry("c", 5000)) == ("refused", "b")


def test_a_retry_is_not_refused_because_of_another(store: Store, client: redis.Redis) -> None:
    send(store, entry("b", 5000))
    assert send(store, entry("a", 9000), "retry") == ("stored", "")
    assert state(client)["{q}:unique"] == {"k": "b"}


def test_a_retry_that_is_sent_again(store: Store, client: redis.Redis) -> None:
    send(store, entry("b", 5000))
    for _ in range(2):
        assert send(store, entry("a", 9000), "retry") == ("stored", "")
    assert check_backlog(client) == {"a": 9000, "b": 5000}


def test_one_that_was_pushed_and_shares_its_id(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("a", 2000, body="other")])
    assert send(store, entry("a", 3000)) == ("stored", "")
    assert send(store, entry("b", 4000), "debounce") == ("pushed", "a\x1f2")
    assert check_backlog(client) == {"a": 2000, "a\x1f2": 4000}
    assert Backlog(store, "q").cancel(["a"]) == [2]


def test_what_is_past_is_cleared(store: Store, client: redis.Redis) -> None:
    for n in range(25):
        send(store, entry(str(n), 2000), key=str(n))
    store.now = "2000"
    store.deliver("q", "A", 25, 1, lease_ms=100)
    for n in range(3):
        send(store, entry(f"new{n}", 3000), key=f"new{n}")
    assert set(state(client)["{q}:unique"]) == {"new0", "new1", "new2"}
    assert client.pttl("{q}:unique") == -1
