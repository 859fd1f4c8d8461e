"""What a person does to the backlog: cancel, reschedule, page, forecast."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest
import redis

from kombu_delayed.inspection import backlog as backlog_module
from kombu_delayed.inspection.backlog import Backlog, Move, Waiting
from kombu_delayed.message.envelope import Kept
from kombu_delayed.message.wait import Wait
from kombu_delayed.store.keys import SEPARATOR
from kombu_delayed.store.store import Entry, Store
from tests.kit.backlog import check_backlog
from tests.kit.state import entry, message, promoted, state

A, B, C = (message(body) for body in "abc")


@pytest.fixture
def backlog(store: Store) -> Backlog:
    store.now = "1000"
    store.partition_size = 4
    return Backlog(store, "q")


def schedule(backlog: Backlog, *entries: Any) -> None:
    backlog.store.schedule("q", entries)


def due_times(client: redis.Redis) -> dict[str, int]:
    return check_backlog(client)


def several(backlog: Backlog) -> None:
    """Three messages that share an id, and one that does not."""
    schedule(backlog, *(entry("a", 2000 + n, body=str(n)) for n in range(3)), entry("b", 2000))


# get, take


def test_get(backlog: Backlog) -> None:
    assert backlog.get("a") == []
    several(backlog)
    assert backlog.get("a") == [
        Waiting(member, Kept(0, 2000 + n, message(str(n)).encode()))
        for n, member in enumerate(["a", "a\x1f2", "a\x1f3"])
    ]
    assert [each.id for each in backlog.get("a")] == ["a"] * 3


def test_take(backlog: Backlog, client: redis.Redis) -> None:
    several(backlog)
    expected = backlog.get("b") + backlog.get("a")[::-1]
    assert list(backlog.take(["b", "x", "a"])) == expected
    assert list(backlog.take(["b", "x", "a"])) == []
    assert due_times(client) == {}


# cancel


def test_cancel(backlog: Backlog, client: redis.Redis) -> None:
    schedule(backlog, entry("a", 2000), entry("b", 3000))
    assert backlog.cancel(["a", "x"]) == [1, 0]
    assert due_times(client) == {"b": 3000}
    assert backlog.cancel(["a"]) == [0]
    assert backlog.cancel(["b"]) == [1]
    assert set(state(client)) == {"{q}:wake"}


@pytest.mark.parametrize(("members", "how"), [(False, "all"), (True, "one")])
def test_cancel_sends_what_its_call_packs(
    members: bool, how: str, backlog: Backlog, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[Any, ...]] = []

    def run(*command: Any) -> bytes:
        sent.append(command)
        return b"0 0"

    monkeypatch.setattr(backlog.store, "run", run)
    backlog.cancel(["a", "b"], members=members)
    move, given = backlog.store.cancel_call("q", ["a", "b"], how)
    assert sent == [("EVALSHA", move.sha, *move.pack(given))]


def test_cancel_leaves_what_is_ready(backlog: Backlog, client: redis.Redis) -> None:
    schedule(backlog, entry("a", 500))
    assert backlog.cancel(["a"]) == [0]
    assert state(client)["q"] == [A]


@pytest.mark.parametrize(
    ("names", "members", "counts", "left"),
    [
        (["a"], False, [3], {"b"}),
        (["a"], True, [1], {"a\x1f2", "a\x1f3", "b"}),
        (["a\x1f2", "a"], True, [1, 1], {"a\x1f3", "b"}),
        (["a", "a", "b"], False, [3, 0, 1], set()),
    ],
)
def test_cancel_of_an_id_that_several_share(
    names: list[str],
    members: bool,
    counts: list[int],
    left: set[str],
    backlog: Backlog,
    client: redis.Redis,
) -> None:
    several(backlog)
    assert backlog.cancel(names, members=members) == counts
    assert set(due_times(client)) == left
    if not any("\x1f" in member for member in left):
        assert "{q}:duplicates" not in state(client)


def test_what_was_cancelled_can_be_scheduled_again(backlog: Backlog, client: redis.Redis) -> None:
    schedule(backlog, entry("a", 2000))
    backlog.cancel(["a"])
    schedule(backlog, entry("a", 9000))
    assert due_times(client) == {"a": 9000}


# reschedule


ETA = "1970-01-01T00:00:05+00:00"


@pytest.mark.parametrize(("due", "at_ms"), [("5000", 5000), ("+4000", 5000), ("1001", 1001)])
def test_reschedule(due: str, at_ms: int, backlog: Backlog, client: redis.Redis) -> None:
    schedule(backlog, entry("a", 2000, step=3), entry("b", 3000))
    assert backlog.reschedule([Move("a", due), Move("x", due)]) == [1, 0]
    assert due_times(client) == {"a": at_ms, "b": 3000}
    after = state(client)
    assert after["{q}:messages"] == {"a": "3" + A, "b": "0" + B}
    assert after["{q}:wake"] == {"due": min(at_ms, 2000)}
    assert "q" not in after


@pytest.mark.parametrize("due", ["1000", "0", "+0"])
def test_reschedule_to_a_time_that_has_come(
    due: str, backlog: Backlog, client: redis.Redis
) -> None:
    schedule(backlog, entry("a", 2000), entry("b", 3000))
    assert backlog.reschedule([Move("b", due)]) == [1]
    assert due_times(client) == {"a": 2000}
    assert state(client)["q"] == [promoted(B, int(due) if due[0] != "+" else 1000)]
    assert state(client)["{q}:wake"] == {"due": 2000, "now": 0}
    assert backlog.reschedule([Move("b", due)]) == [0]


def test_reschedule_tells_the_message(backlog: Backlog, client: redis.Redis) -> None:
    old = message('"eta": "x"', headers={"eta": "2020-01-01T00:00:00", "z": {"eta": "y"}})
    schedule(backlog, Entry("a", 0, old, "2000"), entry("b", 2000))
    backlog.reschedule([Move("a", "5000", ETA), Move("b", "5000", ETA)])
    new = old.replace("2020-01-01T00:00:00", ETA)
    assert state(client)["{q}:messages"] == {"a": "0" + new, "b": "0" + B}


@pytest.mark.parametrize(
    "headers", [{"eta": None, "z": {"eta": "y"}}, {"eta": None}, {}], ids=["nested", "null", "none"]
)
def test_reschedule_leaves_other_etas(
    headers: dict[str, Any], backlog: Backlog, client: redis.Redis
) -> None:
    text = message("x", headers=headers)
    schedule(backlog, Entry("a", 0, text, "2000"))
    backlog.reschedule([Move("a", "5000", ETA)])
    assert state(client)["{q}:messages"] == {"a": "0" + text}


def test_many_that_share_an_id_run_now(backlog: Backlog, client: redis.Redis) -> None:
    schedule(backlog, *(entry("a", 2000, body=str(n)) for n in range(300)))
    assert backlog.reschedule([Move("a", "+0")]) == [300]
    assert "{q}:duplicates" not in state(client)
    assert client.llen("q") == 300


def test_reschedule_of_one_of_several(backlog: Backlog, client: redis.Redis) -> None:
    schedule(backlog, *(entry("a", 2000 + n, body=str(n)) for n in range(3)))
    assert backlog.reschedule([Move("a\x1f2", "9000")], members=True) == [1]
    assert due_times(client) == {"a": 2000, "a\x1f2": 9000, "a\x1f3": 2002}
    assert backlog.reschedule([Move("a", "7000")]) == [3]
    assert set(due_times(client).values()) == {7000}
    assert len(due_times(client)) == 3


# page


def fill(backlog: Backlog, count: int, spread: int) -> dict[str, int]:
    chance = random.Random(1)
    due = {f"{n}": 2000 + chance.randrange(spread) for n in range(count)}
    schedule(backlog, *(entry(id, at_ms) for id, at_ms in due.items()))
    return due


@pytest.mark.parametrize("spread", [1, 5, 5000])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_pages(size: int, spread: int, backlog: Backlog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog_module, "PAGE_SIZE", size)
    due = fill(backlog, 60, spread)
    pages = list(backlog.pages())
    assert max(map(len, pages)) <= size
    found = [each for page in pages for each in page]
    assert {each.member: each.kept.due_ms for each in found} == due
    assert len(found) == 60
    order = [(each.kept.due_ms, each.member) for each in found]
    assert order == sorted(order)
    low, high = 2000 + spread // 3, 2000 + spread // 2
    part = {each.member for page in backlog.pages(low, high) for each in page}
    assert part == {id for id, at_ms in due.items() if low <= at_ms < high}


@pytest.mark.parametrize("spread", [1, 5, 500])
def test_pages_while_they_are_emptied(
    spread: int, backlog: Backlog, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog_module, "PAGE_SIZE", 7)
    fill(backlog, 100, spread)
    seen: Counter[str] = Counter()
    for page in backlog.pages():
        seen.update(each.member for each in page)
        backlog.cancel([each.member for each in page], members=True)
    assert seen == Counter(str(n) for n in range(100))
    assert due_times(client) == {}


@pytest.mark.parametrize("by_ms", [-50, 1, 30, 900])
@pytest.mark.parametrize("spread", [1, 5, 500])
@pytest.mark.parametrize("size", [1, 7])
def test_pages_while_what_was_read_is_moved(
    size: int, spread: int, by_ms: int, backlog: Backlog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog_module, "PAGE_SIZE", size)
    backlog.store.partition_size = 40
    due = fill(backlog, 100, spread)
    seen: set[str] = set()
    for page in backlog.pages():
        new = [each for each in page if each.member not in seen]
        seen.update(each.member for each in new)
        moves = [Move(each.member, str(each.kept.due_ms + by_ms)) for each in new]
        backlog.reschedule(moves, members=True)
    assert seen == due.keys()
    assert due_times(backlog.store.client) == {id: at_ms + by_ms for id, at_ms in due.items()}


def test_pages_go_by_bytes(backlog: Backlog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the server's locale sorts letters in another order."""
    monkeypatch.setattr(backlog_module, "PAGE_SIZE", 1)
    names = ["a", "B", "aB", "Ab", "é", "z", "_", "a-", "ab"]
    schedule(backlog, *(entry(name, 2000) for name in names))
    found = [each.member for page in backlog.pages() for each in page]
    assert found == sorted(names, key=str.encode)


def test_a_page_is_bounded_in_bytes(backlog: Backlog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog_module, "PAGE_BYTES", 5_000)
    schedule(backlog, *(entry(str(n), 2000 + n, body="x" * 1000) for n in range(40)))
    pages = [[each.member for each in page] for page in backlog.pages()]
    assert [member for page in pages for member in page] == [str(n) for n in range(40)]
    assert 4 < max(map(len, pages)) < 10  # so many and the rest of their partition


def test_a_full_server_can_be_emptied_page_by_page(
    backlog: Backlog, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog_module, "PAGE_SIZE", 50)
    backlog.store.partition_size = 300
    fill(backlog, 200, 1)
    client.config_set("maxmemory", 1)
    try:
        for page in backlog.pages():
            backlog.cancel([each.member for each in page], members=True)
    finally:
        client.config_set("maxmemory", 0)
    assert due_times(client) == {}


@pytest.mark.parametrize("size", [2, None])
def test_pages_with_a_needle(size: int | None, backlog: Backlog) -> None:
    schedule(backlog, *(entry(str(n), 2000 + n, body=f"{n} needle{n % 3}") for n in range(9)))
    found = [each.member for page in backlog.pages(needle="needle1", size=size) for each in page]
    assert found == ["1", "4", "7"]


def test_pages_of_nothing(backlog: Backlog) -> None:
    assert [each for page in backlog.pages() for each in page] == []


def test_pages_with_an_empty_id(backlog: Backlog) -> None:
    schedule(backlog, entry("", 2000), entry("a", 2000))
    pages = [page for page, _ in zip(backlog.pages(size=1), range(9), strict=False)]
    assert [each.member for page in pages for each in page] == ["", "a"]


def test_page_by_page(backlog: Backlog) -> None:
    schedule(backlog, *(entry(f"{n:02}", 2000 + n // 4) for n in range(20)))
    found, place = backlog.page(size=3)
    while place is not None:
        page, place = backlog.page(place, size=3)
        found += page
    assert [each.member for each in found] == [f"{n:02}" for n in range(20)]
    first, place = backlog.page(due_after_ms=2001, due_before_ms=2002, size=2)
    assert place is not None
    assert [each.member for each in first] == ["04", "05"]
    # What the place stands for may have gone.
    backlog.cancel(["05"])
    assert [each.member for each in backlog.page(place, due_before_ms=2002)[0]] == ["06", "07"]


# revise


@pytest.mark.parametrize("due_ms", [5000, 500])
def test_revise(due_ms: int, backlog: Backlog, client: redis.Redis) -> None:
    schedule(backlog, entry("a", 2000), entry("b", 3000))
    [read] = backlog.get("a")
    assert backlog.revise(read, 6, message("new").encode(), due_ms)
    after = state(client)
    if due_ms > 1000:
        assert due_times(client) == {"a": 5000, "b": 3000}
        assert after["{q}:messages"] == {"a": "6" + message("new"), "b": "0" + B}
    else:
        assert due_times(client) == {"b": 3000}
        assert after["q" + SEPARATOR + "6"] == [promoted(message("new"), due_ms)]
    assert not backlog.revise(read, 6, message("other").encode(), due_ms)
    assert state(client) == after


def test_revise_keeps_what_the_text_says_of_a_wait(backlog: Backlog, client: redis.Redis) -> None:
    schedule(backlog, entry("a", 2000))
    text = Wait(900, "closed").put_into(message("new"))
    assert backlog.revise(backlog.get("a")[0], 0, text.encode(), 2000)
    assert backlog.get("a") == [Waiting("a", Kept(0, 2000, text.encode()))]
    assert backlog.revise(backlog.get("a")[0], 0, text.encode(), 500)
    assert state(client)["q"] == [promoted(text, 500)]


def test_revise_to_an_earlier_time_wakes_a_consumer(backlog: Backlog, client: redis.Redis) -> None:
    schedule(backlog, entry("a", 5000))
    assert backlog.revise(backlog.get("a")[0], 0, message("new").encode(), 2000)
    assert state(client)["{q}:wake"] == {"due": 2000}


def test_revise_one_of_several(backlog: Backlog, client: redis.Redis) -> None:
    several(backlog)
    assert backlog.revise(backlog.get("a")[1], 3, message("new").encode(), 9000)
    assert due_times(client) == {"a": 2000, "a\x1f2": 9000, "a\x1f3": 2002, "b": 2000}


# forecast


@pytest.mark.parametrize("limit", [1, 3, 1000])
@pytest.mark.parametrize("spread", [1, 50, 5000])
@pytest.mark.parametrize("edges", [[], [2000], [2500, 2500], [100, 2010, 2020, 4000, 9000]])
def test_forecast(
    edges: list[int], spread: int, limit: int, backlog: Backlog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog_module, "FORECAST_LIMIT", limit)
    due = fill(backlog, 80, spread).values()
    bounds = [0, *edges, 2**60]
    expected = [
        sum(low <= at_ms < high for at_ms in due) for low, high in itertools.pairwise(bounds)
    ]
    assert backlog.forecast(edges) == expected


@pytest.mark.parametrize("edges", [[2, 1], range(300)])
def test_forecast_refuses(edges: Any, backlog: Backlog) -> None:
    with pytest.raises(ValueError, match="at most 250 edges, in ascending order"):
        backlog.forecast(edges)


# consumers


def test_consumers(backlog: Backlog, client: redis.Redis) -> None:
    store = backlog.store
    store.publish("q", [entry(name) for name in "abc"])
    for name, want, lease_ms in (("late", 2, 500), ("early", 1, 200), ("idle", 0, 300)):
        store.deliver("q", name, want, 1, lease_ms=lease_ms)
    assert store.leases.consumers("q") == [("early", 200, 1), ("idle", 300, 0), ("late", 500, 2)]
    store.now = "1250"
    assert store.leases.consumers("q") == [("early", -1, 1), ("idle", 50, 0), ("late", 250, 2)]
    store.now = "1200"
    assert store.leases.consumers("q")[0] == ("early", 0, 1)
    before = state(client)
    store.leases.consumers("q")
    assert state(client) == before


def test_no_consumers(store: Store) -> None:
    assert store.leases.consumers("q") == []
