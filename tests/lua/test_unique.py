"""One delayed message for each unique key."""

from __future__ import annotations

import pytest
import redis

from kombu_delayed.inspection.backlog import Backlog
from kombu_delayed.store.store import Entry, Store
from tests.kit.backlog import check_backlog
from tests.kit.claims import deliver
from tests.kit.state import entry, message, promoted, state

A, B = message("a"), message("b")


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


@pytest.mark.parametrize(
    ("conflict", "due", "answer", "left", "wake"),
    [
        ("refuse", 3000, ("refused", "a"), {"a": 2000}, 2000),
        ("replace", 3000, ("replaced", "a"), {"b": 3000}, 2000),
        ("debounce", 3000, ("pushed", "a"), {"a": 3000}, 2000),
        ("debounce", 1500, ("pushed", "a"), {"a": 1500}, 1500),
    ],
)
def test_a_second_one(
    conflict: str,
    due: int,
    answer: tuple[str, str],
    left: dict[str, int],
    wake: int,
    store: Store,
    client: redis.Redis,
) -> None:
    send(store, entry("a", 2000))
    assert send(store, entry("b", due), conflict) == answer
    assert check_backlog(client) == left
    after = state(client)
    (member,) = left
    assert after["{q}:messages"] == {member: "0" + message(member)}
    assert after["{q}:unique"] == {"k": member}
    assert after["{q}:unique-due"] == {"k": left[member]}
    assert after["{q}:wake"] == {"due": wake}


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
def test_other_keys_and_the_same_one_sent_again(
    conflict: str, store: Store, client: redis.Redis
) -> None:
    for _ in range(2):
        assert send(store, entry("a", 2000), conflict) == ("stored", "")
    assert send(store, entry("b", 3000), conflict, key="l") == ("stored", "")
    assert check_backlog(client) == {"a": 2000, "b": 3000}


@pytest.mark.parametrize("way", ["delivered", "cancelled", "purged"])
def test_a_second_one_when_the_first_has_left(way: str, store: Store, client: redis.Redis) -> None:
    send(store, entry("a", 2000))
    if way == "delivered":
        store.now = "2000"
        deliver(store)
    elif way == "cancelled":
        Backlog(store, "q").cancel(["a"])
    else:
        store.purge("q")
    assert send(store, entry("b", 3000)) == ("stored", "")
    assert check_backlog(client) == {"b": 3000}


@pytest.mark.parametrize("conflict", ["refuse", "replace", "debounce"])
def test_a_retry_is_held_against_nobody(conflict: str, store: Store, client: redis.Redis) -> None:
    send(store, entry("a", 2000))
    store.now = "2000"
    deliver(store)
    assert send(store, entry("a", 9000, body="retry"), "retry") == ("stored", "")
    assert send(store, entry("b", 5000), conflict) == ("stored", "")
    assert check_backlog(client) == {"a": 9000, "b": 5000}
    assert send(store, entry("c", 5000)) == ("refused", "b")


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
    deliver(store, want=25)
    for n in range(3):
        send(store, entry(f"new{n}", 3000), key=f"new{n}")
    assert set(state(client)["{q}:unique"]) == {"new0", "new1", "new2"}
    assert client.pttl("{q}:unique") == -1
