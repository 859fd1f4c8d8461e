from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from kombu_delayed.store import store as store_module
from kombu_delayed.store.keys import SEPARATOR
from kombu_delayed.store.store import Size, Store
from tests.kit.claims import bodies, deliver
from tests.kit.restoring import kept, restore
from tests.kit.state import entry, message, seed, state

A, B, C, D = (message(body) for body in "abcd")
MID = "q" + SEPARATOR + "3"


def test_publish(store: Store, client: redis.Redis) -> None:
    """A message goes behind the others; publishing it twice makes two messages."""
    seed(client, {"q": [D]})
    for _ in range(2):
        assert store.publish("q", [entry("a"), entry("b", step=3), entry("c")]) == 3
    assert state(client) == {"q": [D, A, C, A, C], MID: [B, B], "{q}:wake": {"now": 0}}


@pytest.mark.parametrize(
    ("steps", "step", "key"),
    [
        ((0, 3, 6, 9), 2, "q"),
        ((0, 3, 6, 9), 5, MID),
        ((0,), 9, "q"),
        ((2, 5), 9, "q" + SEPARATOR + "5"),
        (tuple(range(10)), 7, "q" + SEPARATOR + "7"),
    ],
)
def test_step_between_two_lists_counts_as_the_more_urgent(
    steps: tuple[int, ...], step: int, key: str, client: redis.Redis
) -> None:
    store = Store(client, priority_steps=steps, now="1000")
    store.publish("q", [entry("a", step=step)])
    assert state(client) == {key: [A], "{q}:wake": {"now": 0}}


def test_step_that_is_given_twice_counts_once(client: redis.Redis) -> None:
    store = Store(client, priority_steps=(0, 0, 5), now="1000")
    store.schedule("q", [entry("a", 1500)])
    store.publish("q", [entry("b")])
    store.now = "2000"
    assert store.size("q") == Size(ready=1, due=1, delayed=1)
    assert bodies(deliver(store)) == ["b", "a"]


def test_stock_producer_s_lists_are_the_same(store: Store, client: redis.Redis) -> None:
    client.lpush("q", A)
    client.lpush("q", B)
    store.publish("q", [entry("c")])
    assert bodies(deliver(store)) == ["a", "b", "c"]


def test_size(store: Store, client: redis.Redis) -> None:
    assert store.size("q") == Size(0, 0, 0)
    seed(client, {"q": [A, B], MID: [C], "{q}:unacked:A": {"1": "0" + D}})
    store.schedule("q", [entry("a", 2000), entry("b", 3000), entry("c", 4000)])
    before = state(client)
    assert store.size("q") == Size(ready=3, due=0, delayed=3)
    store.now = "3000"
    assert store.size("q") == Size(ready=3, due=2, delayed=3)
    assert state(client) == before


#: The keys that a purge leaves.
LEFT: dict[str, Any] = {
    "{q}:unacked:A": {"1": "0" + D},
    "{q}:dead": {"d": 5},
    "{q}:dead-messages": {"d": "0" + D},
    "{q}:dead-reasons": {"d": "{}"},
    "{q}:consumers": {"A": 9000},
    "{q}:armed": "2000 A",
}


def fill(store: Store) -> None:
    """Fill the queue with 2 + 4 messages, and with keys that a purge leaves."""
    seed(store.client, {"q": [A], MID: [B]})
    entries = [entry("a", 2000), entry("b", 3000), entry("a", 2500, body="x"), entry("c", 2000)]
    store.schedule("q", entries)
    seed(store.client, LEFT)


def test_purge(store: Store, client: redis.Redis) -> None:
    fill(store)
    for count in (6, 0):
        assert store.purge("q") == count
        assert state(client) == LEFT


def test_purge_ends_while_others_send(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store)
    ask, calls = store.ask, [*range(5)]

    def asked(name: str, *args: Any, **given: Any) -> Any:
        found = ask(name, *args, **given)
        if name == "purge":
            calls.pop()
            store.publish("q", [entry("d")])
        return found

    monkeypatch.setattr(store, "ask", asked)
    monkeypatch.setattr(store_module, "PURGE_LIMIT", 3)
    assert store.purge("q") == 7
    assert store.size("q") == Size(ready=1, due=0, delayed=0)


def test_delete(store: Store, client: redis.Redis) -> None:
    fill(store)
    left = {key: value for key, value in LEFT.items() if key != "{q}:armed"}
    for count in (6, 0):
        assert store.delete("q") == count
        assert state(client) == left
    store.schedule("q", [entry("a", 2500)])
    assert state(client)["{q}:wake"] == {"due": 2500}


@pytest.mark.parametrize(
    ("ready", "dues", "wake"),
    [
        ({}, [], {}),
        ({"q": [A]}, [], {"now": 0}),
        ({MID: [A]}, [], {"now": 0}),
        ({}, [3000, 2000], {"due": 2000}),
        ({"q": [A]}, [2000], {"now": 0, "due": 2000}),
    ],
)
def test_announce(
    ready: dict[str, Any], dues: list[int], wake: dict[str, int], store: Store, client: redis.Redis
) -> None:
    seed(client, ready)
    store.schedule("q", [entry(str(due), due) for due in dues])
    client.delete("{q}:wake")
    before = state(client)
    for _ in range(2):
        store.claimable.announce("q")
        assert state(client) == {**before, **({"{q}:wake": wake} if wake else {})}


#: Moves that put a message into the backlog; its due time may be earlier than all others.
MOVES: dict[str, Callable[[Store, int], object]] = {
    "schedule": lambda s, due_ms: s.schedule("q", [entry("a", due_ms)]),
    "restore": lambda s, due_ms: restore(s, [("a", kept(A, due_ms))]),
    "replay": lambda s, due_ms: s.dead.replay("q", ["d"], due_ms),
    "park": lambda s, due_ms: s.park("q", "A", [(1, "a", due_ms)]),
}


@pytest.mark.parametrize("tokens", [{"due": 3000}, {}], ids=["token", "promise"])
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_an_earliest_due_time_makes_a_token(
    move: Callable[[Store, int], object],
    tokens: dict[str, int],
    store: Store,
    client: redis.Redis,
) -> None:
    """A consumer has promised to claim at 3000, or will take the token for that time."""
    for due_ms, expected in ((4000, tokens), (2000, {"due": 2000})):
        client.flushall()
        store.schedule("q", [entry("b", 3000)])
        client.delete("{q}:wake")
        seed(client, {**LEFT, "{q}:wake": tokens})
        move(store, due_ms)
        assert state(client).get("{q}:wake", {}) == expected


def test_token_is_never_put_off(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:wake": {"due": 1500}})
    store.schedule("q", [entry("a", 2000)])
    store.claimable.announce("q")
    assert state(client)["{q}:wake"] == {"due": 1500}


def test_announced_due_time_is_one_that_another_consumer_is_told(
    store: Store, client: redis.Redis
) -> None:
    """The announcing consumer is about to stop: its promise must not keep others from claiming."""
    store.schedule("q", [entry("a", 5000)])
    deliver(store, "A")
    store.claimable.announce("q")
    assert client.bzpopmin("{q}:wake", 1) == (b"{q}:wake", b"due", 5000.0)
    assert deliver(store, "B").next_due_ms == 5000
