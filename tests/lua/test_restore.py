"""What a backup has, put back: each message once, whatever became of it meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kombu_delayed.inspection.backlog import Backlog, Move
from kombu_delayed.inspection.events import read
from kombu_delayed.store.store import Entry, Limits, Store
from tests.kit.backlog import check_backlog, due_times
from tests.kit.restoring import kept, restore, restore_dead
from tests.kit.state import dead_state, entry, message, note, promoted, seed, state

A, B, C = (message(body) for body in "abc")
KEYED = message("a", headers={"delayed_unique": "k", "retries": 0})


def with_eta(eta: str) -> str:
    return message("a", headers={"eta": eta})


@pytest.fixture(autouse=True)
def _time_stands_still(store: Store) -> None:
    store.now = "1000"
    store.partition_size = 4


# restore


@pytest.mark.parametrize(
    ("before", "records", "counts", "after"),
    [
        pytest.param(
            [],
            [("a", kept(A, 2000, 3)), ("b", kept(B, 3000))],
            (2, 0),
            {"a": kept(A, 2000, 3), "b": kept(B, 3000)},
            id="gone",
        ),
        pytest.param(
            [entry("a", 2000)],
            [("a", kept(A, 2000)), ("b", kept(B, 3000))],
            (1, 1),
            {"a": kept(A, 2000), "b": kept(B, 3000)},
            id="there",
        ),
        pytest.param(
            [],
            [("a", kept(A, 2000)), ("a", kept(A, 2000))],
            (1, 1),
            {"a": kept(A, 2000)},
            id="twice",
        ),
        pytest.param(
            [entry("a", 9000)],
            [("a", kept(A, 2000))],
            (0, 1),
            {"a": kept(A, 9000)},
            id="moved",
        ),
        pytest.param(
            [Entry("a", 0, with_eta("2100-01-01"), "9000")],
            [("a", kept(with_eta("1970-01-01"), 2000))],
            (0, 1),
            {"a": kept(with_eta("2100-01-01"), 9000)},
            id="moved, and its eta",
        ),
        pytest.param(
            [Entry("a", 0, message("a", properties={"delivery_tag": "new"}), "2000")],
            [("a", kept(message("a", properties={"delivery_tag": "old"}), 2000))],
            (0, 1),
            {"a": kept(message("a", properties={"delivery_tag": "new"}), 2000)},
            id="sent again",
        ),
        pytest.param(
            [entry("a", 2000, body="other")],
            [("a", kept(A, 3000))],
            (1, 0),
            {"a": kept(message("other"), 2000), "a\x1f2": kept(A, 3000)},
            id="another one has its id",
        ),
        pytest.param(
            [entry("a", 2000, step=3)],
            [("a", kept(A, 2000, 6))],
            (1, 0),
            {"a": kept(A, 2000, 3), "a\x1f2": kept(A, 2000, 6)},
            id="another one, by its priority",
        ),
        pytest.param(
            [],
            [("a\x1f2", kept(B, 2000)), ("a", kept(A, 3000))],
            (2, 0),
            {"a": kept(A, 3000), "a\x1f2": kept(B, 2000)},
            id="several share an id",
        ),
        pytest.param(
            [],
            [("a\x1f7", kept(B, 2000))],
            (1, 0),
            {"a\x1f7": kept(B, 2000)},
            id="the last of several",
        ),
        pytest.param(
            [entry("a", 2000, body="x"), entry("a", 2000, body="y")],
            [("a\x1f2", kept(B, 3000)), ("a", kept(A, 3000))],
            (2, 0),
            {
                "a": kept(message("x"), 2000),
                "a\x1f2": kept(message("y"), 2000),
                "a\x1f3": kept(B, 3000),
                "a\x1f4": kept(A, 3000),
            },
            id="others share their id",
        ),
        pytest.param([], [("a", kept(A, 500))], (1, 0), {"a": kept(A, 500)}, id="due by now"),
    ],
)
def test_restore(
    before: list[Entry],
    records: list[tuple[str, str]],
    counts: tuple[int, int],
    after: dict[str, str],
    store: Store,
    client: redis.Redis,
) -> None:
    if before:
        store.schedule("q", before)
    assert restore(store, records) == counts
    check_restored(client, after)
    assert restore(store, records) == (0, len(records))
    check_restored(client, after)


def check_restored(client: redis.Redis, after: dict[str, str]) -> None:
    found = client.hgetall("{q}:messages")
    assert {id.decode(): record.decode() for id, record in found.items()} == after
    members = check_backlog(client)
    numbers: dict[str, int] = {}
    for member in members:
        id, _, n = member.partition("\x1f")
        if n:
            numbers[id] = max(numbers.get(id, 0), int(n))
    assert {k.decode(): int(n) for k, n in client.hgetall("{q}:duplicates").items()} == numbers
    assert client.zrange("{q}:wake", 0, -1, withscores=True) == [(b"due", min(members.values()))]


@pytest.mark.parametrize("count", [3, 4, 5, 90])
def test_restored_messages_fill_partitions(count: int, store: Store, client: redis.Redis) -> None:
    due = {f"{n}": 2000 + n % 7 for n in range(count)}
    records = [(id, kept(message(id), at_ms)) for id, at_ms in due.items()]
    assert restore(store, records) == (count, 0)
    assert check_backlog(client) == due
    assert state(client)["{q}:wake"] == {"due": 2000}


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    there=st.dictionaries(st.sampled_from("abcde"), st.integers(2000, 2020)),
    moments=st.lists(st.tuples(st.sampled_from("abcdefghijkl"), st.integers(1, 5000)), max_size=40),
)
def test_any_order_of_due_times_is_indexed(
    there: dict[str, int], moments: list[tuple[str, int]], store: Store, client: redis.Redis
) -> None:
    client.flushdb()
    store.schedule("q", [entry(id, due_ms, body="other") for id, due_ms in there.items()])
    restored, _ = restore(store, [(id, kept(A, due_ms)) for id, due_ms in moments])
    members = check_backlog(client)
    assert len(members) == len(there) + restored
    assert {id for id, _ in moments} <= {member.partition("\x1f")[0] for member in members}
    for dues in due_times(client):
        assert len(set(dues)) == 1 or len(dues) < store.partition_size


def test_what_is_due_by_now_waits_for_the_next_deliver(store: Store, client: redis.Redis) -> None:
    restore(store, [("a", kept(A, 500)), ("b", kept(B, 5000))])
    assert "q" not in state(client)
    assert store.size("q") == (0, 1, 2)
    answer = store.deliver("q", "A", 9, 1, lease_ms=100)
    assert answer is not None
    assert answer.records == [b"0" + promoted(A, 500).encode()]
    assert check_backlog(client) == {"b": 5000}


def test_what_shares_an_id_is_found_by_it(store: Store, client: redis.Redis) -> None:
    restore(store, [("a\x1f3", kept(C, 4000))])
    store.schedule("q", [entry("a", 2000), entry("a", 3000, body="b")])
    assert set(check_backlog(client)) == {"a", "a\x1f2", "a\x1f3"}
    assert Backlog(store, "q").cancel(["a"]) == [3]
    assert set(state(client)) == {"{q}:wake"}


def test_what_was_displaced_and_moved_is_there(store: Store, client: redis.Redis) -> None:
    record = ("a", kept(with_eta("1970-01-01"), 2000))
    store.schedule("q", [entry("a", 3000, body="other")])
    assert restore(store, [record]) == (1, 0)
    Backlog(store, "q").reschedule([Move("a\x1f2", "9000", "2100-01-01")], members=True)
    assert restore(store, [record]) == (0, 1)
    assert check_backlog(client) == {"a": 3000, "a\x1f2": 9000}


def test_what_was_displaced_comes_again_when_its_name_is_free(
    store: Store, client: redis.Redis
) -> None:
    """It may be one that was sent twice on purpose: two are better than none."""
    store.schedule("q", [entry("a", 3000, body="other")])
    assert restore(store, [("a", kept(A, 2000))]) == (1, 0)
    assert Backlog(store, "q").cancel(["a"], members=True) == [1]
    assert restore(store, [("a", kept(A, 2000))]) == (1, 0)
    assert check_backlog(client) == {"a": 2000, "a\x1f2": 2000}


@pytest.mark.parametrize(
    ("tokens", "due_ms", "after"),
    [
        ({"due": 3000}, 2000, {"due": 2000}),
        ({"due": 3000}, 4000, {"due": 3000}),
        ({"due": 3000}, 500, {"due": 500}),
        ({"due": 3000, "now": 0}, 2000, {"due": 2000, "now": 0}),
        ({}, 2000, {"due": 2000}),  # a consumer has promised to come at 3000
        ({}, 3000, ""),
        ({}, 4000, ""),
    ],
)
def test_wake_tokens(
    tokens: dict[str, int], due_ms: int, after: Any, store: Store, client: redis.Redis
) -> None:
    store.schedule("q", [entry("a", 3000)])
    client.delete("{q}:wake")
    seed(client, {"{q}:wake": tokens})
    restore(store, [("b", kept(B, due_ms))])
    assert state(client).get("{q}:wake", "") == after


def test_what_is_there_wakes_nobody(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("a", 3000)])
    client.delete("{q}:wake")
    assert restore(store, [("a", kept(A, 2000))]) == (0, 1)
    assert "{q}:wake" not in state(client)


# Unique keys.


def keyed(body: str, **headers: Any) -> str:
    return message(body, headers={"delayed_unique": "k", **headers})


@pytest.mark.parametrize(
    ("headers", "holds"),
    [
        ({}, True),
        ({"retries": 0}, True),
        ({"retries": None}, True),
        ({"retries": 1}, False),
        ({"retries": 12}, False),
        ({"delayed_unique": None}, False),
        ({"delayed_unique": ""}, False),
    ],
)
def test_a_restored_message_holds_its_key(
    headers: dict[str, Any], holds: bool, store: Store, client: redis.Redis
) -> None:
    restore(store, [("a", kept(keyed("a", **headers), 2000))])
    after = state(client)
    assert after.get("{q}:unique") == ({"k": "a"} if holds else None)
    assert after.get("{q}:unique-due") == ({"k": 2000} if holds else None)
    answer = store.schedule_unique("q", entry("b", 3000), "k", "refuse")
    assert answer == (("refused", "a") if holds else ("stored", ""))


def test_a_key_that_another_has_taken_stays_its(store: Store, client: redis.Redis) -> None:
    store.schedule_unique("q", entry("b", 3000), "k", "refuse")
    assert restore(store, [("a", kept(KEYED, 2000))]) == (1, 0)
    assert state(client)["{q}:unique"] == {"k": "b"}
    assert state(client)["{q}:unique-due"] == {"k": 3000}


def test_a_key_whose_message_has_left_is_free(store: Store, client: redis.Redis) -> None:
    store.schedule_unique("q", entry("b", 3000), "k", "refuse")
    Backlog(store, "q").cancel(["b"])
    assert restore(store, [("a", kept(KEYED, 2000))]) == (1, 0)
    assert state(client)["{q}:unique"] == {"k": "a"}
    assert state(client)["{q}:unique-due"] == {"k": 2000}
    assert client.pttl("{q}:unique") == -1


def test_the_key_goes_with_the_name_in_the_backlog(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("a", 3000, body="other")])
    restore(store, [("a", kept(KEYED, 2000))])
    assert state(client)["{q}:unique"] == {"k": "a\x1f2"}


def test_the_first_of_two_with_one_key_holds_it(store: Store, client: redis.Redis) -> None:
    restore(store, [("b", kept(keyed("b"), 3000)), ("a", kept(KEYED, 2000))])
    assert state(client)["{q}:unique"] == {"k": "b"}


# Events.


def test_what_is_restored_is_told_once(client: redis.Redis) -> None:
    store = Store(client, event_limit=100, now="1000")
    text = message("a", headers={"id": "a", "task": "mail.send"})
    records = [("a\x1f2", kept(text, 2000)), ("b", kept(B, 500))]
    for _ in range(2):
        restore(store, records)
    told = [(each.event, each.id, each.task, each.due_ms) for each in read(store, "q")]
    assert told == [("scheduled", "a", "mail.send", 2000), ("scheduled", "b", "", 500)]


def test_nothing_is_told_unless_asked(store: Store, client: redis.Redis) -> None:
    restore(store, [("a", kept(A, 2000))])
    assert client.exists("{q}:events") == 0


# restore_dead


def letters(**found: tuple[str, str, int]) -> dict[str, Any]:
    """The state with these dead letters: record, reason and time of burial of each member."""
    return {
        "{q}:dead": {_member(name): at_ms for name, (_, _, at_ms) in found.items()},
        "{q}:dead-messages": {_member(name): record for name, (record, _, _) in found.items()},
        "{q}:dead-reasons": {
            _member(name): note(reason, at_ms=at_ms) for name, (_, reason, at_ms) in found.items()
        },
    }


def _member(name: str) -> str:
    return name.replace("_", "\x1f")


def letter(member: str, text: str, reason: str, at_ms: int) -> tuple[str, int, str, str]:
    return member, at_ms, text, note(reason, at_ms=at_ms)


@pytest.mark.parametrize(
    ("before", "restored", "counts", "after"),
    [
        pytest.param(
            {},
            [letter("a", "3" + A, "r", 700), letter("b", "0" + B, "s", 600)],
            (2, 0),
            letters(a=("3" + A, "r", 700), b=("0" + B, "s", 600)),
            id="gone",
        ),
        pytest.param(
            letters(a=("0" + A, "r", 700)),
            [letter("a", "0" + A, "r", 700), letter("b", "0" + B, "s", 600)],
            (1, 1),
            letters(a=("0" + A, "r", 700), b=("0" + B, "s", 600)),
            id="there",
        ),
        pytest.param(
            letters(a=("0" + A, "again", 900)),
            [letter("a", "0" + A, "r", 700)],
            (0, 1),
            letters(a=("0" + A, "again", 900)),
            id="buried anew",
        ),
        pytest.param(
            letters(a=("0" + C, "other", 900)),
            [letter("a", "0" + A, "r", 700)],
            (1, 0),
            letters(a=("0" + C, "other", 900), a_2=("0" + A, "r", 700)),
            id="another one has its id",
        ),
        pytest.param(
            letters(a=("0" + C, "other", 900), a_2=("0" + B, "other", 900)),
            [letter("a\x1f5", "0" + A, "r", 700), letter("a", "0" + A, "r", 1)],
            (2, 0),
            letters(
                a=("0" + C, "other", 900),
                a_2=("0" + B, "other", 900),
                a_3=("0" + A, "r", 1),
                a_5=("0" + A, "r", 700),
            ),
            id="several share an id",
        ),
        pytest.param(
            letters(a=("0" + A, "r", 700)),
            [letter("a", "3" + A, "r", 700)],
            (1, 0),
            letters(a=("0" + A, "r", 700), a_2=("3" + A, "r", 700)),
            id="another one, by its priority",
        ),
    ],
)
def test_restore_dead(
    before: dict[str, Any],
    restored: list[tuple[str, int, str, str]],
    counts: tuple[int, int],
    after: dict[str, Any],
    store: Store,
    client: redis.Redis,
) -> None:
    seed(client, before)
    assert restore_dead(store, restored) == counts
    assert dead_state(client) == after
    assert restore_dead(store, restored) == (0, len(restored))
    assert dead_state(client) == after


@pytest.mark.parametrize("restored", ["new", "there"])
def test_restored_dead_letters_last_until_a_burial(
    restored: str, store: Store, client: redis.Redis
) -> None:
    """Also those that are older: whoever restores them looks for them."""
    store.limits, store.now = Limits(dead_seconds=60), "100000"
    if restored == "there":
        seed(client, letters(a=("0" + A, "r", 700)))
    restore_dead(store, [letter("a", "0" + A, "r", 700)])
    keys = ("{q}:dead", "{q}:dead-messages", "{q}:dead-reasons")
    assert all(client.exists(key) for key in keys)
    assert [client.pttl(key) for key in keys] == [-1] * 3
    store.bury("q", "A", [(1, "b", "rejected", b"0{}")])
    assert store.dead.ids("q") == ["b"]


def test_restored_dead_letters_are_read_and_replayed(store: Store, client: redis.Redis) -> None:
    restore_dead(store, [letter("a", "0" + A, "r", 700), letter("b", "3" + B, "s", 600)])
    assert store.dead.ids("q") == ["b", "a"]
    (found,) = store.dead.letters("q", ["a"])
    assert (found.message, found.reason, found.at_ms) == (A.encode(), "r", 700)
    assert store.dead.replay("q", ["a"]) == 1
    assert state(client)["q"] == [A]
    assert store.dead.purge("q", ["b"]) == 1
    assert set(state(client)) == {"q", "{q}:wake"}
