"""A unique key that a task holds until it has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from kombu_delayed.inspection.backlog import Backlog
from kombu_delayed.inspection.ready.lists import ReadyLists
from kombu_delayed.store.store import Entry, Store
from tests.kit.claims import deliver
from tests.kit.state import message, state

DAY_MS = 86_400_000
FREE = {"{q}:unique-held", "{q}:unique-until"}


def task(id: str, due: int) -> Entry:
    """A task whose key has a quote, as JSON writes it."""
    headers = {"id": id, "delayed_unique": 'k"', "delayed_until": "finished"}
    return Entry(id, 0, message(id, headers=headers), str(due))


def test_what_was_due_long_ago(store: Store) -> None:
    store.now = str(10**12)
    send(store, "a", 0)
    assert send(store, "b") == ("refused", "a")


def send(
    store: Store,
    id: str,
    due: int = 2000,
    conflict: str = "refuse",
    until_end: bool = True,
    **more: Any,
) -> tuple[str, str]:
    return store.schedule_unique("q", task(id, due), 'k"', conflict, until_end=until_end, **more)


def hold(store: Store, id: str, left_ms: int) -> None:
    store.leases.hold_keys("q", [('k"', id, left_ms)], on_error=pytest.fail)
    store.size("q")  # it does not wait, but the next command does


@pytest.mark.parametrize("conflict", ["refuse", "replace", "debounce"])
@pytest.mark.parametrize("until_end", [False, True])
@pytest.mark.parametrize("where", ["ready", "unacked", "acked"])
def test_others_are_refused_until_its_end(
    conflict: str, until_end: bool, where: str, store: Store, client: redis.Redis
) -> None:
    if where == "ready":
        send(store, "a", due=500)
    else:
        send(store, "a")
        store.now = "2000"
        deliver(store)
    if where == "acked":
        client.delete("{q}:unacked:A")
    assert send(store, "b", 3000, conflict, until_end) == ("refused", "a")
    assert send(store, "a") == ("stored", "")  # its sender does not know that it was stored
    assert store.size("q").delayed == 0
    hold(store, "b", 0)
    assert send(store, "b", 3000, conflict, until_end) == ("refused", "a")
    hold(store, "a", 0)
    assert send(store, "b", 3000, conflict, until_end) == ("stored", "")
    held = state(client).get("{q}:unique-held")
    assert held == ({'k"': "b"} if until_end else None)


def test_while_it_is_delayed_the_conflict_decides(store: Store, client: redis.Redis) -> None:
    send(store, "a")
    assert send(store, "b", 3000) == ("refused", "a")
    assert send(store, "b", 3000, "debounce") == ("pushed", "a")
    assert state(client)["{q}:unique-until"] == {'k"': 3000 + 30 * DAY_MS}
    assert send(store, "b", 4000, "replace") == ("replaced", "a")
    assert state(client)["{q}:unique-held"] == {'k"': "b"}
    assert send(store, "c", 4000, "replace", until_end=False) == ("replaced", "b")
    assert FREE.isdisjoint(state(client))


def test_a_retry_keeps_it(store: Store, client: redis.Redis) -> None:
    send(store, "a")
    store.now = "2000"
    deliver(store)
    send(store, "a", 5000, "retry")
    assert state(client)["{q}:unique-until"] == {'k"': 5000 + 30 * DAY_MS}
    assert send(store, "b", 3000) == ("refused", "a")
    store.drop("q", "A", 1, "it is retried", ends=False)
    assert send(store, "b", 3000) == ("refused", "a")
    send(store, "c", 5000, "retry")  # of a task from before
    assert state(client)["{q}:unique-held"] == {'k"': "a"}


@pytest.mark.parametrize("until_end", [False, True])
@pytest.mark.parametrize("due", [500, 3000])
def test_a_task_that_replaces_its_holder_is_stored(
    due: int, until_end: bool, store: Store, client: redis.Redis
) -> None:
    send(store, "a", 500)
    assert send(store, "b", due, until_end=until_end, replaces=True) == ("refused", "a")
    deliver(store)
    assert send(store, "a", due, until_end=until_end, replaces=True) == ("stored", "")
    size = store.size("q")
    assert (size.ready, size.delayed) == ((1, 0) if due == 500 else (0, 1))
    held = state(client).get("{q}:unique-held")
    assert held == ({'k"': "a"} if until_end else None)


ENDS: dict[str, tuple[int, Callable[[Store], object]]] = {
    "cancelled": (2000, lambda store: Backlog(store, "q").cancel(["a"])),
    "purged": (2000, lambda store: store.purge("q")),
    "purged, ready": (500, lambda store: store.purge("q")),
    "dropped": (500, lambda store: (deliver(store), store.drop("q", "A", 1, "old"))),
    "buried": (500, lambda store: (deliver(store), store.bury("q", "A", [(1, "a", "bad", b"")]))),
    "poison": (500, lambda store: (deliver(store), store.release("q", "A", [1], counted=True))),
    "withdrawn": (
        500,
        lambda store: ReadyLists(store, "q").withdraw(
            [each for page in ReadyLists(store, "q").pages() for each in page]
        ),
    ),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("with_events", [False, True])
def test_each_end_gives_it_back(
    end: str, with_events: bool, store: Store, client: redis.Redis
) -> None:
    store.limits = store.limits._replace(max_deliveries=1)
    store.event_limit = 100 if with_events else 0
    due, ends = ENDS[end]
    send(store, "a", due)
    assert send(store, "b", 3000) == ("refused", "a")
    ends(store)
    assert FREE.isdisjoint(state(client))
    assert send(store, "b", 3000) == ("stored", "")


def test_an_end_of_another_with_its_key(store: Store) -> None:
    send(store, "a", 500)
    deliver(store)
    store.schedule("q", [task("b", 3000)])
    assert Backlog(store, "q").cancel(["b"]) == [1]
    assert send(store, "c", 3000) == ("refused", "a")


def test_it_is_not_held_for_ever(store: Store, client: redis.Redis) -> None:
    send(store, "a")
    store.now = "2000"
    deliver(store)
    store.now = str(2000 + 30 * DAY_MS - 1)
    assert send(store, "b", 10**12) == ("refused", "a")
    hold(store, "a", 60_000)
    store.now = str(2000 + 30 * DAY_MS + 59_998)
    assert send(store, "b", 10**12) == ("refused", "a")
    store.now = str(2000 + 30 * DAY_MS + 59_999)
    assert send(store, "b", 10**12) == ("stored", "")
    store.now = str(10**12 - 1)  # e.g. rescheduled: a delayed task still has the key
    client.zadd("{q}:unique-until", {'k"': 1})
    store.schedule_unique("q", task("x", 10**12 + 1), "other", "refuse")
    assert state(client)["{q}:unique-until"] == {'k"': 10**12 + 30 * DAY_MS}


def test_what_is_past_is_cleared(store: Store, client: redis.Redis) -> None:
    for n in range(15):
        entry = task(str(n), 500)
        store.schedule_unique("q", entry, str(n), "refuse", until_end=True)
    store.now = str(1000 + 30 * DAY_MS)
    for n in range(2):
        store.schedule_unique("q", task(f"new{n}", 10**12), f"new{n}", "refuse")
    assert FREE.isdisjoint(state(client))
