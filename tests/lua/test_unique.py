from __future__ import annotations

from collections.abc import Callable

import pytest
import redis

from kombu_delayed.inspection.backlog import Backlog, Move
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


@pytest.mark.parametrize("until_end", [False, True])
@pytest.mark.parametrize("conflict", ["refuse", "replace", "debounce"])
def test_an_id_that_another_message_has(conflict: str, until_end: bool, store: Store) -> None:
    """Its sender, who has lost the answer, sends it again; then comes one with another id."""
    store.schedule("q", [entry("a", 2000)])
    own = entry("a", 3000, body="own")
    for _ in range(2):
        outcome = store.schedule_unique("q", own, "k", conflict, until_end=until_end)
        assert outcome == ("stored", "")
    done, _ = store.schedule_unique("q", entry("b", 4000), "k", conflict, until_end=until_end)
    assert done == {"refuse": "refused", "replace": "replaced", "debounce": "pushed"}[conflict]
    assert store.size("q").delayed == 2


def test_what_is_past_is_cleared(store: Store, client: redis.Redis) -> None:
    for n in range(25):
        send(store, entry(str(n), 2000), key=str(n))
    store.now = "2000"
    deliver(store, want=25)
    for n in range(3):
        send(store, entry(f"new{n}", 3000), key=f"new{n}")
    assert set(state(client)["{q}:unique"]) == {"new0", "new1", "new2"}
    assert client.pttl("{q}:unique") == -1


def send_with_header(store: Store, id: str, due_ms: int) -> None:
    text = message(id, headers={"delayed_unique": f"key of {id}"})
    send(store, Entry(id, 0, text, str(due_ms)), key=f"key of {id}")


LEAVING: dict[str, Callable[[Store], object]] = {
    "cancel": lambda s: Backlog(s, "q").cancel(["a"]),
    "cancel one": lambda s: Backlog(s, "q").cancel(["a"], members=True),
    "run now": lambda s: Backlog(s, "q").reschedule([Move("a", "500")]),
}


@pytest.mark.parametrize("leave", LEAVING.values(), ids=LEAVING)
def test_who_leaves_before_its_time_leaves_no_key(
    leave: Callable[[Store], object], store: Store, client: redis.Redis
) -> None:
    for id in ("a", "b"):
        send_with_header(store, id, 9000)
    send_with_header(store, "a2", 9000)
    leave(store)
    assert state(client)["{q}:unique"] == {"key of a2": "a2", "key of b": "b"}
    assert state(client)["{q}:unique-due"] == {"key of a2": 9000, "key of b": 9000}


def test_the_key_of_another_one_stays(store: Store, client: redis.Redis) -> None:
    send_with_header(store, "a", 9000)
    client.hset("{q}:unique", "key of a", "z")
    assert Backlog(store, "q").cancel(["a"]) == [1]
    assert state(client)["{q}:unique"] == {"key of a": "z"}


@pytest.mark.parametrize("clear", [lambda s: s.purge("q"), lambda s: s.delete("q")])
def test_an_empty_queue_has_no_keys(
    clear: Callable[[Store], int], store: Store, client: redis.Redis
) -> None:
    for id in ("a", "b"):
        send_with_header(store, id, 2000)
    store.now = "2000"
    deliver(store, want=1, lease_ms=0)
    assert client.exists("{q}:unique", "{q}:unique-due") == 2
    assert clear(store) == 1
    assert client.exists("{q}:unique", "{q}:unique-due") == 0


def test_keys_expire_with_their_queue_once_nothing_is_delayed(
    store: Store, client: redis.Redis
) -> None:
    keys = ("{q}:unique", "{q}:unique-due")
    for id, due_ms in (("a", 2000), ("b", 3000)):
        send_with_header(store, id, due_ms)
    for now_ms, expires in ((2000, False), (3000, True)):
        store.now = str(now_ms)
        deliver(store, want=1, lease_ms=0, expires_ms=60_000)
        assert [0 < client.pttl(key) <= 60_000 for key in keys] == [expires, expires]
    send_with_header(store, "c", 9000)
    assert [client.pttl(key) for key in keys] == [-1, -1]
