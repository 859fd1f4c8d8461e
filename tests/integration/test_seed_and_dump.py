"""A queue as plain data, from a store and back."""

from __future__ import annotations

import pytest
import redis

from kombu_delayed.store.store import Size, Store
from kombu_delayed.testing import dump, keyspace, seed
from kombu_delayed.testing import state as state_module
from tests.kit.state import entry, message, promoted

A, B, C, D = (message(body) for body in "abcd")

FULL = {
    "delayed": [
        {"id": "a", "due_ms": 500, "step": 0, "message": A},
        {"id": "b", "due_ms": 2000, "step": 3, "message": B},
        {"id": "b", "due_ms": 3000, "step": 3, "message": B},
        {"id": "c", "due_ms": 4000, "step": 0, "message": C},
    ],
    "ready": [{"step": 0, "message": C}, {"step": 0, "message": A}, {"step": 6, "message": B}],
    "unacked": [
        {"consumer": "A", "tag": 2, "step": 0, "message": A},
        {"consumer": "A", "tag": 10, "step": 3, "message": "\udcff is not text"},
        {"consumer": "B", "tag": 1, "step": 0, "message": C},
    ],
    "dead": [
        {
            "id": id,
            "reason": "rejected",
            "consumer": "A",
            "at_ms": at_ms,
            "deliveries": 1,
            "step": 9,
            "message": D,
        }
        for id, at_ms in [("d", 700), ("d\x1f2", 800)]
    ],
    "consumers": {"A": 31_000, "B": 20_000},
    "wake": {"due": 2000},
    "armed": "2000 A",
    "unique": {"key": "c"},
}

EMPTY = {
    "delayed": [],
    "ready": [],
    "unacked": [],
    "dead": [],
    "consumers": {},
    "wake": {},
    "armed": "",
    "unique": {},
}


@pytest.fixture(autouse=True)
def _time_stands_still(store: Store) -> None:
    store.now = "1000"


def test_dump_is_what_seed_was_given(store: Store) -> None:
    assert dump(store, "q") == EMPTY
    seed(store, "q", **FULL)
    assert dump(store, "q") == FULL
    assert store.now == "1000"
    assert store.size("q") == Size(ready=3, due=1, delayed=4)


def test_seed_adds_to_what_is_there(store: Store) -> None:
    seed(store, "q", ready=[{"message": A}], delayed=[{"id": "b", "due_ms": 2000, "message": B}])
    seed(store, "q", ready=[{"message": C}], delayed=[{"id": "d", "due_ms": 1500, "message": D}])
    found = dump(store, "q")
    assert [each["message"] for each in found["ready"]] == [A, C]
    assert [each["id"] for each in found["delayed"]] == ["d", "b"]
    assert found["wake"] == {"now": 0, "due": 1500}


def test_seeded_messages_move(store: Store) -> None:
    seed(
        store,
        "q",
        delayed=[{"id": "a", "due_ms": 900, "message": A}],
        ready=[{"message": B}],
        unacked=[{"consumer": "A", "tag": 7, "message": C}],
        dead=[{"id": "d", "reason": "no", "consumer": "A", "at_ms": 1000, "message": D}],
    )
    assert store.leases.consumers("q") == [("A", 30_000, 1)]
    assert store.dead.replay("q", ["d"]) == 1
    assert store.release("q", "A", [7]) == 1
    answer = store.deliver("q", "B", 9, 1, lease_ms=100)
    assert answer
    texts = [record[1:].decode() for record in answer.records]
    assert texts[1:] == [B, D, promoted(A, 900)]
    assert texts[0].startswith(C[:-1])


def test_a_message_that_moves_meanwhile_is_seen(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.publish("q", [entry("a")])

    def read_key(client: redis.Redis, key: str) -> keyspace.Value:
        store.deliver("q", "A", 1, 1, lease_ms=9_000)
        return keyspace.read_key(client, key)

    monkeypatch.setattr(state_module, "read_key", read_key)
    assert [each["message"] for each in dump(store, "q")["unacked"]] == [A]


def test_prefix(client: redis.Redis) -> None:
    prefixed = Store(client, prefix="shop:", now="1000")
    seed(prefixed, "q", **FULL)
    assert dump(prefixed, "q") == FULL
    assert dump(Store(client), "q") == EMPTY
