"""A kill at every step of operations by people and backups: done again, it is as if done once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import redis

from kombu_delayed.inspection import events
from kombu_delayed.inspection.backlog import Backlog
from kombu_delayed.inspection.doctor import examination, examine_queues, messages
from kombu_delayed.store import store as store_module
from kombu_delayed.store.store import Store
from tests.crash.deaths import (
    DUE_MS,
    MANY,
    NOW_MS,
    Case,
    ack,
    buried,
    bury,
    dead_letters,
    deliver,
    every_death,
    held,
    inherit,
    living_store,
    park,
    publish,
    schedule,
    unacked,
)
from tests.kit.backlog import check_backlog
from tests.kit.restoring import kept, restore, restore_dead
from tests.kit.state import all_keys, entry, message, note

pytestmark = pytest.mark.crash

LATE_DUE_MS = DUE_MS + 1_000


@pytest.fixture(autouse=True)
def _smaller_calls(small_calls: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "PURGE_LIMIT", 2)
    monkeypatch.setattr(messages, "CALL_LIMIT", 2)
    monkeypatch.setattr(examination, "PAGE_SIZE", 2)


def nothing(store: Store) -> None:
    pass


# Unique tasks.


def first_with_the_key(store: Store) -> None:
    store.schedule_unique("q", entry("0", DUE_MS), "k", "refuse")


def second_with_the_key(conflict: str, due: str = str(LATE_DUE_MS)) -> Case:
    def move(store: Store) -> None:
        store.schedule_unique("q", entry("1", due), "k", conflict)

    return Case(move, first_with_the_key)


@pytest.mark.parametrize(
    ("conflict", "after", "holder"),
    [
        ("refuse", {"0": DUE_MS}, b"0"),
        ("replace", {"1": LATE_DUE_MS}, b"1"),
        ("debounce", {"0": LATE_DUE_MS}, b"0"),
        ("retry", {"0": DUE_MS, "1": LATE_DUE_MS}, b"0"),
    ],
)
def test_a_unique_task_that_is_sent_again(
    conflict: str, after: dict[str, int], holder: bytes, client: redis.Redis
) -> None:
    case, found = second_with_the_key(conflict), []
    for death in every_death(client, case):
        found.append(check_backlog(client))
        case.move(living_store(client, case))
        assert check_backlog(client) == after, f"{conflict} at {death}"
        assert client.hgetall("{q}:unique") == {b"k": holder}, f"{conflict} at {death}"
        assert inherit(client) == Counter(after.keys()), f"{conflict} at {death}"
    before = {"0": DUE_MS}
    assert found == [before, before, after, after]  # the first command is answered NOSCRIPT


@pytest.mark.parametrize(("conflict", "runs"), [("replace", "1"), ("debounce", "0")])
def test_a_unique_task_that_is_due(conflict: str, runs: str, client: redis.Redis) -> None:
    """Either this one, the other one, or at its due time the push of the other: one runs, once."""
    case, found = second_with_the_key(conflict, str(NOW_MS)), set()
    for death in every_death(client, case):
        bodies = inherit(client)
        assert bodies in (Counter("0"), Counter(runs)), f"{conflict} at {death}"
        found.update(bodies)
    assert found == {"0", runs}


# Backups.


def put_back(store: Store) -> None:
    for at in range(0, len(MANY), 2):
        restore(store, [(id, kept(message(id), DUE_MS)) for id in MANY[at : at + 2]])


def put_back_dead(store: Store) -> None:
    for at in range(0, len(MANY), 2):
        part = MANY[at : at + 2]
        restore_dead(store, [(id, NOW_MS, "0" + message(id), note("r")) for id in part])


def some_are_there(store: Store) -> None:
    store.schedule("q", [entry(id, DUE_MS) for id in MANY[2:4]])
    store.schedule("q", [entry(MANY[0], DUE_MS, body="other")])


@pytest.mark.parametrize(
    ("setup", "others", "expected"),
    [(nothing, [], {0, 2, 4, 6, 7}), (some_are_there, ["other"], {3, 5, 7, 8})],
    ids=["empty", "some are there"],
)
def test_a_restore_that_is_repeated(
    setup: Callable[[Store], None], others: list[str], expected: set[int], client: redis.Redis
) -> None:
    case, found = Case(put_back, setup, publishes=True), set()
    for death in every_death(client, case):
        found.add(len(check_backlog(client)))
        put_back(living_store(client, case))
        check_backlog(client)
        assert inherit(client) == Counter([*MANY, *others]), f"at {death}"
    assert found == expected


def test_a_restore_that_is_not_repeated(client: redis.Redis) -> None:
    for at, cut in every_death(client, Case(put_back)):
        there = list(check_backlog(client))
        assert sorted(there) == MANY[: len(there)]
        assert inherit(client) == Counter(there), f"at {at}, {cut}"


def test_a_restore_of_dead_letters_that_is_repeated(client: redis.Redis) -> None:
    case, found = Case(put_back_dead), set()
    for death in every_death(client, case):
        found.add(client.zcard("{q}:dead"))
        put_back_dead(living_store(client, case))
        assert dead_letters(client) == Counter(MANY), f"at {death}"
        store = living_store(client, case)
        assert store.dead.replay("q", store.dead.ids("q")) == len(MANY), f"at {death}"
        assert inherit(client) == Counter(MANY), f"at {death}"
    assert found == {0, 2, 4, 6, 7}


# The doctor.


def damaged(store: Store) -> None:
    """Orphans, entries without a message, a forgotten partition, other times; no wake tokens."""
    client, store.partition_size = store.client, 4
    store.schedule("q", [entry(id, DUE_MS + int(id)) for id in MANY])
    names = [name.decode() for name in client.zrange("{q}:partitions", 0, -1)]
    assert len(names) > 2
    client.zrem("{q}:delayed:" + names[0], MANY[0])
    client.zadd("{q}:delayed:" + names[0], {"lost": DUE_MS})
    client.zrem("{q}:partitions", names[1])
    client.zadd("{q}:delayed:" + names[2], {MANY[-1]: DUE_MS + 500})
    client.hset("{q}:messages", "broken", "x")
    client.delete("{q}:wake")


def repair(store: Store) -> None:
    store.partition_size = 4
    examine_queues(store, ["q"], fix=True, patience_seconds=0)


def test_a_repair_that_is_repeated(client: redis.Redis) -> None:
    case, found = Case(repair, damaged), set()
    for death in every_death(client, case):
        messages = {id.decode() for id in client.hkeys("{q}:messages")}
        buried = {id.decode() for id in client.hkeys("{q}:dead-messages")}
        assert messages - {"broken"} == set(MANY), f"at {death}"
        assert (messages | buried) == {*MANY, "broken"}, f"at {death}"
        assert not messages & buried, f"at {death}"
        found.add(client.zcard("{q}:partitions"))
        repair(living_store(client, case))
        due = {id: DUE_MS + int(id) for id in MANY}
        assert check_backlog(client) == due, f"at {death}"
        assert client.zrange("{q}:wake", 0, -1, withscores=True) == [(b"due", DUE_MS)]
        assert examine_queues(living_store(client, case), ["q"], patience_seconds=0) == []
        assert inherit(client) == Counter(MANY), f"at {death}"
    assert len(found) > 1


# Purge and delete.


def full(store: Store) -> None:
    """Some are ready, some delayed, one is unacked, one is dead."""
    store.publish("q", [entry(id) for id in ("unacked", "dead")])
    deliver(store)
    store.bury("q", "A", [(2, "dead", "r", b"")])
    store.publish("q", [entry(f"ready {id}") for id in MANY[:3]])
    store.schedule("q", [entry(f"delayed {id}", DUE_MS + int(id)) for id in MANY])


def test_purged_never_comes_back(client: redis.Redis) -> None:
    found = set()
    for death in every_death(client, Case(lambda store: store.purge("q") and None, full)):
        left = list(check_backlog(client))
        ready = client.llen("q")
        found.add((ready, len(left)))
        bodies = inherit(client)
        assert bodies["unacked"] == 1, f"at {death}"
        assert sum(bodies.values()) == 1 + ready + len(left), f"at {death}"
        assert {body for body in bodies if body[0] == "d"} == set(left), f"at {death}"
        assert dead_letters(client) == Counter(["dead"]), f"at {death}"
    assert found == {(3, 7), (0, 5), (0, 3), (0, 1), (0, 0)}


@pytest.mark.parametrize("verb", ["purge", "delete"])
def test_a_purge_that_is_repeated(verb: str, client: redis.Redis) -> None:
    case = Case(lambda store: getattr(store, verb)("q"), full, event_limit=1000)
    for death in every_death(client, case):
        case.move(living_store(client, case))
        kept_keys = {"{q}:consumers", "{q}:unacked:A"}
        kept_keys |= {"{q}:dead", "{q}:dead-messages", "{q}:dead-reasons"}
        left = set(all_keys(client)) - ({"{q}:armed"} if verb == "purge" else set())
        assert left == kept_keys, f"{verb} at {death}"
        assert client.exists("{q}:events") == (verb == "purge"), f"{verb} at {death}"
        assert unacked(client) == Counter(["unacked"]), f"{verb} at {death}"


# Events.


@pytest.mark.parametrize(
    ("event", "move", "setup", "where", "goes"),
    [
        ("scheduled", schedule, nothing, check_backlog, False),
        ("scheduled", put_back, nothing, check_backlog, False),
        ("scheduled", park, held, check_backlog, False),
        ("delivered", deliver, publish, unacked, False),
        ("acked", lambda s: ack(s, 1, 2, 3), held, unacked, True),
        ("buried", bury, held, dead_letters, False),
        ("released", lambda s: s.release("q", "A", range(1, 6)), held, unacked, True),
        ("released", lambda s: s.leases.leave("q", "A"), held, unacked, True),
        ("cancelled", lambda s: Backlog(s, "q").cancel(MANY), schedule, check_backlog, True),
        ("replayed", lambda s: s.dead.replay("q", MANY), buried, dead_letters, True),
    ],
)
def test_what_has_happened_is_told_and_nothing_else(
    event: str,
    move: Callable[[Store], Any],
    setup: Callable[[Store], None],
    where: Callable[[redis.Redis], Iterable[str]],
    goes: bool,
    client: redis.Redis,
) -> None:
    """`where` finds the messages with the event, or those without it, if they go (`goes`)."""
    case, found = Case(move, setup, event_limit=1000), set()
    for death in every_death(client, case):
        told = events.read(living_store(client, case), "q")
        ids = [each.id for each in told if each.event == event]
        there = set(where(client))
        assert Counter(ids) == Counter(set(MANY) - there if goes else there), f"{event} at {death}"
        found.add(len(ids))
    assert len(found) > 1
