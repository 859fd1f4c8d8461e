"""What every backlog does, seen through its methods alone."""

from __future__ import annotations

import inspect
import itertools
import random

import pytest

from kombu_delayed.backlog import Backlog, Move, Waiting
from kombu_delayed.message import Kept
from kombu_delayed.store import Entry, Size
from kombu_delayed.testing import FakeBacklog, dump
from kombu_delayed.waits import Wait
from tests.contract.conftest import AnyBacklog
from tests.kit.state import entry, message, promoted

ETA = "1970-01-01T00:00:05+00:00"


def schedule(backlog: AnyBacklog, *entries: Entry) -> None:
    backlog.store.schedule("q", entries)


def waiting(backlog: AnyBacklog) -> list[Waiting]:
    return [each for page in backlog.pages() for each in page]


def due_times(backlog: AnyBacklog) -> dict[str, int]:
    return {each.member: each.kept.due_ms for each in waiting(backlog)}


def ready(backlog: AnyBacklog) -> list[str]:
    return [each["message"] for each in dump(backlog.store, "q")["ready"]]


def several(backlog: AnyBacklog) -> None:
    """Three messages that share an id, and one that does not."""
    schedule(backlog, *(entry("a", 2000 + n, body=str(n)) for n in range(3)), entry("b", 2000))


def test_get(backlog: AnyBacklog) -> None:
    assert backlog.get("a") == []
    several(backlog)
    assert backlog.get("a") == [
        Waiting(member, Kept(0, 2000 + n, message(str(n)).encode()))
        for n, member in enumerate(["a", "a\x1f2", "a\x1f3"])
    ]
    assert [each.id for each in backlog.get("a")] == ["a"] * 3


def test_take(backlog: AnyBacklog) -> None:
    several(backlog)
    expected = backlog.get("b") + backlog.get("a")[::-1]
    assert list(backlog.take(["b", "x", "a"])) == expected
    assert list(backlog.take(["b", "x", "a"])) == []
    assert backlog.store.size("q") == Size(0, 0, 0)


@pytest.mark.parametrize(
    ("names", "members", "counts", "left"),
    [
        (["a", "x"], False, [3, 0], {"b"}),
        (["a"], True, [1], {"a\x1f2", "a\x1f3", "b"}),
        (["a\x1f2", "a"], True, [1, 1], {"a\x1f3", "b"}),
        (["a", "a", "b"], False, [3, 0, 1], set()),
    ],
)
def test_cancel(
    names: list[str], members: bool, counts: list[int], left: set[str], backlog: AnyBacklog
) -> None:
    several(backlog)
    assert backlog.cancel(names, members=members) == counts
    assert set(due_times(backlog)) == left


def test_cancelled_can_be_scheduled_again(backlog: AnyBacklog) -> None:
    schedule(backlog, entry("a", 2000))
    backlog.cancel(["a"])
    schedule(backlog, entry("a", 9000))
    assert due_times(backlog) == {"a": 9000}


@pytest.mark.parametrize(("due", "at_ms"), [("5000", 5000), ("+4000", 5000), ("1001", 1001)])
def test_reschedule(due: str, at_ms: int, backlog: AnyBacklog) -> None:
    schedule(backlog, entry("a", 2000, step=3), entry("b", 3000))
    assert backlog.reschedule([Move("a", due), Move("x", due)]) == [1, 0]
    assert due_times(backlog) == {"a": at_ms, "b": 3000}
    assert dump(backlog.store, "q")["wake"] == {"due": min(at_ms, 2000)}
    assert backlog.get("a")[0].kept == Kept(3, at_ms, message("a").encode())


@pytest.mark.parametrize("due", ["1000", "0", "+0"])
def test_reschedule_to_a_time_that_has_come(due: str, backlog: AnyBacklog) -> None:
    schedule(backlog, entry("a", 2000), entry("b", 3000))
    assert backlog.reschedule([Move("b", due)]) == [1]
    assert due_times(backlog) == {"a": 2000}
    assert ready(backlog) == [promoted(message("b"), 1000 if due == "+0" else int(due))]
    assert dump(backlog.store, "q")["wake"] == {"due": 2000, "now": 0}
    assert backlog.reschedule([Move("b", due)]) == [0]


def test_reschedule_tells_the_message(backlog: AnyBacklog) -> None:
    old = message('"eta": "x"', headers={"eta": "2020-01-01T00:00:00", "z": {"eta": "y"}})
    schedule(backlog, Entry("a", 0, old, "2000"), entry("b", 2000))
    backlog.reschedule([Move("a", "5000", ETA), Move("b", "5000", ETA)])
    new = old.replace("2020-01-01T00:00:00", ETA)
    assert {each.kept.message.decode() for each in waiting(backlog)} == {new, message("b")}


def test_reschedule_of_one_of_several(backlog: AnyBacklog) -> None:
    several(backlog)
    assert backlog.reschedule([Move("a\x1f2", "9000")], members=True) == [1]
    assert due_times(backlog) == {"a": 2000, "b": 2000, "a\x1f3": 2002, "a\x1f2": 9000}
    assert backlog.reschedule([Move("a", "7000")]) == [3]
    assert sorted(due_times(backlog).values()) == [2000, 7000, 7000, 7000]


def fill(backlog: AnyBacklog, count: int, spread: int) -> dict[str, int]:
    chance = random.Random(1)
    due = {f"{n}": 2000 + chance.randrange(spread) for n in range(count)}
    schedule(backlog, *(entry(id, at_ms) for id, at_ms in due.items()))
    return due


@pytest.mark.parametrize("spread", [1, 5, 5000])
@pytest.mark.parametrize("size", [1, 7, None])
def test_pages(size: int | None, spread: int, backlog: AnyBacklog) -> None:
    due = fill(backlog, 60, spread)
    pages = list(backlog.pages(size=size))
    assert max(map(len, pages)) <= (size or 60)
    found = [(each.kept.due_ms, each.member) for page in pages for each in page]
    assert found == sorted((at_ms, id) for id, at_ms in due.items())
    low, high = 2000 + spread // 3, 2000 + spread // 2
    part = {each.member for page in backlog.pages(low, high, size=size) for each in page}
    assert part == {id for id, at_ms in due.items() if low <= at_ms < high}


@pytest.mark.parametrize("spread", [1, 500])
def test_pages_while_they_are_emptied(spread: int, backlog: AnyBacklog) -> None:
    due = fill(backlog, 50, spread)
    seen = []
    for page in backlog.pages(size=7):
        names = [each.member for each in page]
        seen += names
        assert backlog.cancel(names, members=True) == [1] * len(names)
    assert sorted(seen) == sorted(due)


def test_pages_with_a_needle(backlog: AnyBacklog) -> None:
    schedule(backlog, *(entry(str(n), 2000 + n, body=f"{n} needle{n % 3}") for n in range(9)))
    found = [each.member for page in backlog.pages(needle="needle1", size=2) for each in page]
    assert found == ["1", "4", "7"]


@pytest.mark.parametrize("edges", [[], [2000], [2500, 2500], [100, 2010, 2020, 4000, 9000]])
def test_forecast(edges: list[int], backlog: AnyBacklog) -> None:
    due = fill(backlog, 80, 5000).values()
    bounds = [0, *edges, 2**60]
    expected = [
        sum(low <= at_ms < high for at_ms in due) for low, high in itertools.pairwise(bounds)
    ]
    assert backlog.forecast(edges) == expected


@pytest.mark.parametrize("edges", [[2, 1], list(range(300))])
def test_forecast_refuses(edges: list[int], backlog: AnyBacklog) -> None:
    with pytest.raises(ValueError, match="at most 250 edges, in ascending order"):
        backlog.forecast(edges)


def test_the_fake_has_all_methods_of_the_real_one() -> None:
    def methods(kind: type) -> dict[str, inspect.Signature]:
        found = inspect.getmembers(kind, inspect.isfunction)
        found = [each for each in found if not each[0].endswith("_arguments")]  # of script calls
        return {name: inspect.signature(each) for name, each in found if name[0] != "_"}

    assert methods(FakeBacklog) == methods(Backlog)


def test_page_by_page(backlog: AnyBacklog) -> None:
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


@pytest.mark.parametrize(
    ("due_ms", "expected"), [(5000, {"a": 5000, "b": 3000}), (500, {"b": 3000})]
)
def test_revise(backlog: AnyBacklog, due_ms: int, expected: dict[str, int]) -> None:
    schedule(backlog, entry("a", 2000), entry("b", 3000))
    [read] = backlog.get("a")
    assert backlog.revise(read, 6, message("new").encode(), due_ms)
    assert due_times(backlog) == expected
    if due_ms > 1000:
        assert backlog.get("a") == [Waiting("a", Kept(6, due_ms, message("new").encode()))]
    else:
        assert ready(backlog) == [promoted(message("new"), due_ms)]
    assert not backlog.revise(read, 6, message("other").encode(), due_ms)
    assert due_times(backlog) == expected


def test_revise_keeps_what_the_text_says_of_a_wait(backlog: AnyBacklog) -> None:
    schedule(backlog, entry("a", 2000))
    [read] = backlog.get("a")
    text = Wait(900, "closed").put_into(message("new")).encode()
    assert backlog.revise(read, 0, text, 2000)
    assert backlog.get("a") == [Waiting("a", Kept(0, 2000, text))]
    assert backlog.revise(backlog.get("a")[0], 0, text, 500)
    assert ready(backlog) == [promoted(text.decode(), 500)]


def test_revise_one_of_several(backlog: AnyBacklog) -> None:
    several(backlog)
    read = backlog.get("a")[1]
    assert backlog.revise(read, 3, message("new").encode(), 9000)
    assert due_times(backlog) == {"a": 2000, "a\x1f2": 9000, "a\x1f3": 2002, "b": 2000}
