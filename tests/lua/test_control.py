"""Operations of a person on the backlog: cancel, reschedule, page, forecast."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import redis

from kombu_delayed.inspection import backlog as backlog_module
from kombu_delayed.inspection.backlog import Backlog, Move
from kombu_delayed.message.envelope import Kept
from kombu_delayed.message.wait import Wait
from kombu_delayed.store.keys import SEPARATOR
from kombu_delayed.store.store import Entry, Store
from tests.kit.backlog import check_backlog
from tests.kit.claims import full
from tests.kit.state import entry, message, promoted, state

A, B = message("a"), message("b")
NEW = message("new")


@pytest.fixture
def backlog(store: Store) -> Backlog:
    store.partition_size = 4
    return Backlog(store, "q")


def schedule(backlog: Backlog, *entries: Any) -> None:
    backlog.store.schedule("q", entries)


def several(backlog: Backlog) -> None:
    """Three messages that share an id, and one that does not."""
    schedule(backlog, *(entry("a", 2000 + n, body=str(n)) for n in range(3)), entry("b", 2000))


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
    names: list[str], members: bool, counts: list[int], left: set[str], backlog: Backlog
) -> None:
    several(backlog)
    assert backlog.cancel(names, members=members) == counts
    after = state(backlog.store.client)
    assert set(after.get("{q}:messages", ())) == left
    assert ("{q}:duplicates" in after) == any("\x1f" in member for member in left)


ETA = "1970-01-01T00:00:05+00:00"


@pytest.mark.parametrize(("due", "at_ms"), [("5000", 5000), ("+4000", 5000), ("1001", 1001)])
def test_reschedule(due: str, at_ms: int, backlog: Backlog, client: redis.Redis) -> None:
    schedule(backlog, entry("a", 2000, step=3), entry("b", 3000))
    assert backlog.reschedule([Move("a", due), Move("x", due)]) == [1, 0]
    assert check_backlog(client) == {"a": at_ms, "b": 3000}
    after = state(client)
    assert after["{q}:messages"] == {"a": "3" + A, "b": "0" + B}
    assert after["{q}:wake"] == {"due": min(at_ms, 2000)}
    assert "q" not in after


@pytest.mark.parametrize(("due", "due_ms"), [("1000", 1000), ("0", 0), ("+0", 1000)])
def test_reschedule_to_a_time_that_has_come(
    due: str, due_ms: int, backlog: Backlog, client: redis.Redis
) -> None:
    schedule(backlog, entry("a", 2000), entry("b", 3000))
    assert backlog.reschedule([Move("b", due)]) == [1]
    assert check_backlog(client) == {"a": 2000}
    assert state(client)["q"] == [promoted(B, due_ms)]
    assert state(client)["{q}:wake"] == {"due": 2000, "now": 0}
    assert backlog.reschedule([Move("b", due)]) == [0]


@pytest.mark.parametrize(
    ("headers", "after"),
    [
        ({"eta": "2020-01-01", "z": {"eta": "y"}}, {"eta": ETA, "z": {"eta": "y"}}),
        ({"eta": None, "z": {"eta": "y"}}, None),
        ({"booking": {"eta": "y"}, "eta": "2020-01-01"}, None),
        ({}, None),
    ],
)
def test_reschedule_writes_the_eta_where_there_is_one(
    headers: dict[str, Any], after: dict[str, Any] | None, backlog: Backlog, client: redis.Redis
) -> None:
    body = '"eta": "x"'
    schedule(backlog, Entry("a", 0, message(body, headers=headers), "2000"))
    backlog.reschedule([Move("a", "5000", ETA)])
    expected = message(body, headers=headers if after is None else after)
    assert state(client)["{q}:messages"] == {"a": "0" + expected}


def fill(backlog: Backlog, count: int, spread: int) -> dict[str, int]:
    chance = random.Random(1)
    due = {f"{n}": 2000 + chance.randrange(spread) for n in range(count)}
    schedule(backlog, *(entry(id, at_ms) for id, at_ms in due.items()))
    return due


@pytest.mark.parametrize("by_ms", [-50, 1, 30, 900])
@pytest.mark.parametrize("spread", [1, 5, 500])
def test_pages_while_what_was_read_is_moved(
    spread: int, by_ms: int, backlog: Backlog, client: redis.Redis
) -> None:
    backlog.store.partition_size = 40
    due = fill(backlog, 100, spread)
    seen: set[str] = set()
    for page in backlog.pages(size=7):
        new = [each for each in page if each.member not in seen]
        seen.update(each.member for each in new)
        moves = [Move(each.member, str(each.kept.due_ms + by_ms)) for each in new]
        backlog.reschedule(moves, members=True)
    assert seen == due.keys()
    assert check_backlog(client) == {id: at_ms + by_ms for id, at_ms in due.items()}


def test_pages_go_by_bytes(backlog: Backlog) -> None:
    """This is so even if the server's locale sorts letters in another order."""
    names = ["a", "B", "aB", "Ab", "é", "z", "_", "a-", "ab", ""]
    schedule(backlog, *(entry(name, 2000) for name in names))
    pages = itertools.islice(backlog.pages(size=1), 99)
    assert [each.member for page in pages for each in page] == sorted(names, key=str.encode)


def test_a_page_is_bounded_in_bytes(backlog: Backlog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog_module, "PAGE_BYTES", 5_000)
    schedule(backlog, *(entry(str(n), 2000 + n, body="x" * 1000) for n in range(40)))
    pages = [[each.member for each in page] for page in backlog.pages()]
    assert [member for page in pages for member in page] == [str(n) for n in range(40)]
    assert 4 < max(map(len, pages)) < 10  # so many and the rest of their partition


def test_very_many_messages_may_share_an_id(backlog: Backlog, client: redis.Redis) -> None:
    """More than a script of the server takes as a list."""
    schedule(backlog, *(entry("x", 2000 + n, body=str(n)) for n in range(3)))
    client.hset("{q}:duplicates", "x", 8_001)  # the others were cancelled
    assert [each.member for each in backlog.get("x")] == ["x", "x\x1f2", "x\x1f3"]


def test_a_full_server_can_be_emptied_page_by_page(backlog: Backlog, client: redis.Redis) -> None:
    backlog.store.partition_size = 300
    fill(backlog, 200, 1)
    with full(client):
        for page in backlog.pages(size=50):
            backlog.cancel([each.member for each in page], members=True)
    assert check_backlog(client) == {}


def test_page_by_page(backlog: Backlog) -> None:
    assert backlog.page() == ([], None, 0)
    schedule(backlog, *(entry(f"{n:02}", 2000 + n // 4) for n in range(20)))
    found, place, looked_at = backlog.page(due_after_ms=2001, due_before_ms=2002, size=2)
    assert ([each.member for each in found], looked_at) == (["04", "05"], 2)
    backlog.cancel(["05"])  # the message that the place stands for
    assert [each.member for each in backlog.page(place, due_before_ms=2002)[0]] == ["06", "07"]


def test_revise(backlog: Backlog, client: redis.Redis) -> None:
    schedule(backlog, entry("a", 5000), entry("b", 6000))
    [read] = backlog.get("a")
    client.delete("{q}:wake")
    assert backlog.revise(read, 6, NEW.encode(), 2000)
    assert check_backlog(client) == {"a": 2000, "b": 6000}
    after = state(client)
    assert after["{q}:messages"] == {"a": "6" + NEW, "b": "0" + B}
    assert after["{q}:wake"] == {"due": 2000}
    assert not backlog.revise(read, 6, message("other").encode(), 500)
    assert state(client) == after


def test_revise_to_a_time_that_has_come(backlog: Backlog, client: redis.Redis) -> None:
    schedule(backlog, entry("a", 2000))
    [read] = backlog.get("a")
    assert backlog.revise(read, 6, NEW.encode(), 500)
    assert state(client)["q" + SEPARATOR + "6"] == [promoted(NEW, 500)]
    assert not backlog.revise(read, 6, NEW.encode(), 2000)
    assert check_backlog(client) == {}


def test_revise_keeps_what_the_text_says_of_a_wait(backlog: Backlog, client: redis.Redis) -> None:
    schedule(backlog, entry("a", 2000))
    text = Wait(900, "closed").put_into(NEW)
    assert backlog.revise(backlog.get("a")[0], 0, text.encode(), 2000)
    assert [(each.member, each.kept) for each in backlog.get("a")] == [
        ("a", Kept(0, 2000, text.encode()))
    ]
    assert backlog.revise(backlog.get("a")[0], 0, text.encode(), 500)
    assert state(client)["q"] == [promoted(text, 500)]


@pytest.mark.parametrize("limit", [3, 1000])
@pytest.mark.parametrize("spread", [1, 50, 5000])
@pytest.mark.parametrize("edges", [[], [2000], [2500, 2500], [100, 2010, 2020, 4000, 9000]])
def test_forecast(
    edges: list[int], spread: int, limit: int, backlog: Backlog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog_module, "FORECAST_LIMIT", limit)
    due = fill(backlog, 80, spread).values()
    bounds = itertools.pairwise([0, *edges, 2**60])
    expected = [sum(low <= at_ms < high for at_ms in due) for low, high in bounds]
    assert backlog.forecast(edges) == expected


@pytest.mark.parametrize("edges", [[2, 1], range(300)])
def test_forecast_refuses(edges: Any, backlog: Backlog) -> None:
    with pytest.raises(ValueError, match="at most 250 edges, in ascending order"):
        backlog.forecast(edges)
