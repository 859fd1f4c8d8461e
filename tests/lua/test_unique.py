from __future__ import annotations

import pytest
import redis

from kombu_delayed.store.store import Entry, Store
from tests.kit.backlog import check_backlog
from tests.kit.claims import deliver
from tests.kit.state import entry, message, state


def send(store: Store, sent: Entry, conflict: str = "refuse", key: str = "k") -> tuple[str, str]:
    return store.schedule_unique("q", sent, key, conflict)


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


def test_what_is_past_is_cleared(store: Store, client: redis.Redis) -> None:
    for n in range(25):
        send(store, entry(str(n), 2000), key=str(n))
    store.now = "2000"
    deliver(store, want=25)
    for n in range(3):
        send(store, entry(f"new{n}", 3000), key=f"new{n}")
    assert set(state(client)["{q}:unique"]) == {"new0", "new1", "new2"}
    assert client.pttl("{q}:unique") == -1
