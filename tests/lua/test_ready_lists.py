"""Operations of a person on ready messages: read, withdraw, amend."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from kombu_delayed.inspection.backlog import Backlog
from kombu_delayed.inspection.ready import lists as module
from kombu_delayed.inspection.ready.lists import Ready, ReadyLists
from kombu_delayed.store.keys import SEPARATOR
from kombu_delayed.store.store import Store
from tests.kit.backlog import check_backlog
from tests.kit.state import entry, message, state

URGENT, PLAIN, LAST = "q", f"q{SEPARATOR}3", f"q{SEPARATOR}9"

NEW = message("new")


@pytest.fixture
def lists(store: Store, monkeypatch: pytest.MonkeyPatch) -> ReadyLists:
    """Six messages, the first three of them urgent; pages and windows are small."""
    monkeypatch.setattr(module, "PAGE_SIZE", 2)
    monkeypatch.setattr(module, "WINDOW", 2)
    store.schedule("q", [entry(f"m{n}", 1, step=0 if n < 3 else 3) for n in range(6)])
    return ReadyLists(store, "q")


def text(n: int) -> str:
    return message(f"m{n}")


def read(lists: ReadyLists, *needles: str) -> list[Ready]:
    return [each for page in lists.pages(needles) for each in page]


def left(client: redis.Redis) -> Any:
    """The ready lists, in the order in which they are delivered."""
    after = state(client)
    return {
        key: [each.decode() if isinstance(each, bytes) else each for each in after[key]]
        for key in (URGENT, PLAIN, LAST)
        if key in after
    }


@pytest.mark.parametrize(
    ("needles", "found"),
    [
        ((), [(0, 0, 2), (0, 1, 1), (0, 2, 0), (3, 0, 5), (3, 1, 4), (3, 2, 3)]),
        (('"m1"', '"m3"'), [(0, 1, 1), (3, 2, 3)]),
        (("nothing",), []),
    ],
)
def test_read(needles: Any, found: Any, lists: ReadyLists) -> None:
    expected = [Ready(step, at, text(n).encode()) for step, at, n in found]
    assert read(lists, *needles) == expected


def test_read_while_others_send(lists: ReadyLists) -> None:
    found = []
    for page in lists.pages():
        found += [each.message.decode() for each in page]
        if len(found) < 9:
            lists.store.schedule("q", [entry(f"n{len(found)}", 1)])
    assert sorted({*map(text, range(6))} - {*found}) == []
    assert len(found) == len({*found})


@pytest.mark.parametrize("gone", [[0], [1], [2], [0, 1, 2], [3, 1], [*range(6)]])
@pytest.mark.parametrize("pushed", [0, 9])
def test_withdraw(gone: list[int], pushed: int, lists: ReadyLists, client: redis.Redis) -> None:
    read_before = {each.message.decode(): each for each in read(lists)}
    meant = [read_before[text(n)] for n in gone]
    others = [message(f"n{n}") for n in range(pushed)]
    lists.store.schedule("q", [entry(f"n{n}", 1) for n in range(pushed)])
    assert lists.withdraw(meant) == [True] * len(gone)
    assert lists.withdraw(meant) == [False] * len(gone)
    urgent = [text(n) for n in range(3) if n not in gone] + others
    plain = [text(n) for n in range(3, 6) if n not in gone]
    assert left(client) == {
        key: value for key, value in ((URGENT, urgent), (PLAIN, plain)) if value
    }


def test_withdraw_page_by_page_passes_nothing_over(lists: ReadyLists, client: redis.Redis) -> None:
    dropped = [sum(lists.withdraw(page)) for page in lists.pages()]
    assert sum(dropped) == 6
    assert left(client) == {}


@pytest.mark.parametrize("pushed", [0, 9])
@pytest.mark.parametrize(
    ("to", "after"),
    [
        ({}, {URGENT: [text(0), NEW, text(2)]}),
        ({"step": 0}, {URGENT: [text(0), NEW, text(2)]}),
        ({"step": 9}, {URGENT: [text(0), text(2)], LAST: [NEW]}),
        ({"is_first": True}, {URGENT: [NEW, text(0), text(2)]}),
        ({"due_ms": 5_000}, {URGENT: [text(0), text(2)]}),
    ],
)
def test_amend(to: Any, after: Any, pushed: int, lists: ReadyLists, client: redis.Redis) -> None:
    lists.store.now = "1000"
    [meant] = read(lists, '"m1"')
    lists.store.schedule("q", [entry(f"n{n}", 1) for n in range(pushed)])
    assert lists.amend(meant, "m1", NEW.encode(), **to)
    assert not lists.amend(meant, "m1", NEW.encode(), **to)
    others = [message(f"n{n}") for n in range(pushed)]
    found = left(client)
    assert found.pop(PLAIN) == [text(3), text(4), text(5)]
    assert found == {**after, URGENT: after[URGENT] + others}
    assert check_backlog(client) == ({"m1": 5_000} if "due_ms" in to else {})
    if "due_ms" in to:
        [waiting] = Backlog(lists.store, "q").get("m1")
        assert (waiting.kept.step, waiting.kept.message.decode()) == (0, NEW)
        assert state(client)["{q}:wake"]["due"] == 5_000


def test_large_messages_are_not_all_read_for_one(store: Store, client: redis.Redis) -> None:
    """A thousand messages of 100 kB around one once blocked the server for half a second."""
    lists = ReadyLists(store, "q")
    ids = [f"{n}-" + "x" * 100_000 for n in range(200)]
    store.schedule("q", [entry(id, 1) for id in ids])
    [meant] = read(lists, ids[100])

    def reads() -> int:
        stats: Any = client.info("commandstats")
        client.config_resetstat()
        return int(stats.get("cmdstat_lrange", {"calls": 0})["calls"])

    reads()
    assert lists.withdraw([meant]) == [True]
    assert reads() == 1
    assert not any(lists._withdraw(meant.step, meant.at, 0, [meant.kept]))  # it is gone
    assert reads() <= 3  # of ten messages each
