"""Ready messages are found by their ids at once, even after others have come or gone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kombu_delayed.inspection.ready import index as module
from kombu_delayed.inspection.ready import lists as lists
from kombu_delayed.inspection.ready.index import ReadyIndex
from kombu_delayed.inspection.ready.lists import ReadyLists
from kombu_delayed.store.store import Entry, Store


def entries(*ids: str, step: int = 0) -> list[Entry]:
    texts = (json.dumps({"body": "", "headers": {"id": id}, "properties": {}}) for id in ids)
    return [Entry(id, step, text) for id, text in zip(ids, texts, strict=True)]


def publish(store: Store, *ids: str, step: int = 0) -> None:
    store.publish("q", entries(*ids, step=step))


def names(start: int, end: int) -> list[str]:
    return [f"m{n}" for n in range(start, end)]


@contextmanager
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Where pages of lists are read from."""
    told: list[int] = []
    page = ReadyLists.page

    def told_page(self: ReadyLists, step: int, start: int, *args: Any) -> Any:
        told.append(start)
        return page(self, step, start, *args)

    with monkeypatch.context() as patch:
        patch.setattr(ReadyLists, "page", told_page)
        yield told


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "PAGE_SIZE", 10)
    monkeypatch.setattr(lists, "AROUND", 3)
    monkeypatch.setattr(module, "FRESH", 5)


def found(index: ReadyIndex, store: Store, id: str) -> list[str]:
    messages, is_sure = index.find(store, ["q"], id)
    assert is_sure
    assert all(each.found().state == "ready" and each.lists.queue == "q" for each in messages)
    return [json.loads(each.ready.message)["headers"]["id"] for each in messages]


def test_the_first_look_reads_and_later_ones_do_not(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = ReadyIndex()
    publish(store, *names(0, 100))
    publish(store, "urgent", step=3)
    assert found(index, store, "m50") == ["m50"]
    with reads(monkeypatch) as told:
        for n in range(100):
            assert found(index, store, f"m{n}") == [f"m{n}"]
            publish(store, f"new{n}")
            assert found(index, store, f"new{n}") == [f"new{n}"]
        assert found(index, store, "urgent") == ["urgent"]
        assert found(index, store, "nobody") == []
    assert told == []


def test_what_comes_at_once_is_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    index = ReadyIndex()
    publish(store, *names(0, 100))
    assert found(index, store, "m0") == ["m0"]
    publish(store, *names(100, 125))
    with reads(monkeypatch) as told:
        assert found(index, store, "m110") == ["m110"]
        assert found(index, store, "m99") == ["m99"]
    assert told == [0, 10, 20]


def test_a_task_is_not_mistaken_for_those_it_has_sent(store: Store) -> None:
    index = ReadyIndex()
    headers = {"id": "child", "root_id": "parent", "parent_id": "parent"}
    text = json.dumps({"body": "", "headers": headers, "properties": {}})
    store.publish("q", [Entry("child", 0, text)])
    assert found(index, store, "child") == ["child"]
    assert found(index, store, "parent") == []
    store.client.rpush("q", entries("parent")[0].message)  # its worker died
    assert found(index, store, "parent") == ["parent"]


def test_what_workers_have_taken_and_put_back(store: Store) -> None:
    index = ReadyIndex()
    publish(store, *names(0, 100))
    assert found(index, store, "m5") == ["m5"]
    got = store.deliver("q", "w:1:x", 10, 1, lease_ms=30_000)
    assert got is not None
    assert found(index, store, "m5") == []
    assert found(index, store, "m10") == ["m10"]
    store.release("q", "w:1:x", [1, 2])
    assert found(index, store, "m1") == ["m1"]
    store.deliver("q", "w:1:x", 1_000, 11, lease_ms=30_000)
    assert found(index, store, "m99") == []
    publish(store, "late")
    assert found(index, store, "late") == ["late"]


def test_what_is_taken_out_of_the_middle(store: Store) -> None:
    index, ready = ReadyIndex(), ReadyLists(store, "q")
    publish(store, *names(0, 100))
    assert found(index, store, "m0") == ["m0"]
    pages = [each for page in ready.pages() for each in page]
    ready.withdraw(pages[20:60])
    for n in (0, 10, 30, 39, 80, 99):
        assert found(index, store, f"m{n}") == [f"m{n}"]
    assert found(index, store, "m50") == []


def test_what_it_has_taken_out_moves_the_others(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = ReadyIndex()
    publish(store, *names(0, 100))
    assert found(index, store, "m0") == ["m0"]
    with reads(monkeypatch) as told:
        for n in range(90, 10, -1):
            [place], _ = index.find(store, ["q"], f"m{n}")
            if n % 2:
                assert place.lists.withdraw([place.ready]) == [True]
            else:
                due_ms = 4_000_000_000_000 if n % 4 else None
                text = place.ready.message
                assert place.lists.amend(place.ready, f"m{n}", text, due_ms=due_ms, is_first=True)
        for n in (0, 5, 10, 91, 99):
            [place], _ = index.find(store, ["q"], f"m{n}")
            text = store.run("LINDEX", "q", place.ready.at)
            assert json.loads(text)["headers"]["id"] == f"m{n}"
        assert found(index, store, "m13") == []
    assert told == []
    known = index._known["q", 0]
    known.forget(0)
    assert len(known.gone) == 5


def test_ids_that_several_have(store: Store) -> None:
    index = ReadyIndex()
    publish(store, "a", "b")
    assert found(index, store, "a") == ["a"]
    assert not index.is_shared(["q"], "a")
    publish(store, "a")
    assert found(index, store, "a") == ["a"]
    assert index.is_shared(["q"], "a")
    assert not index.is_shared(["q"], "b")
    assert not index.is_shared(["p"], "a")


def test_many_ids_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    index = ReadyIndex()
    publish(store, *names(0, 100))
    publish(store, "urgent", step=3)
    store.publish("p", entries("other", "m5"))
    asked = {"q": [*names(0, 100), "urgent", "nobody"], "p": ["other", "m5", "m6"]}
    expected = {("q", id) for id in asked["q"]} | {("p", "other"), ("p", "m5")}
    expected.remove(("q", "nobody"))
    sent, all_of = [], store.all_of
    monkeypatch.setattr(store, "all_of", lambda calls: sent.append(0) or all_of(calls))  # type: ignore[func-returns-value]
    for trips in (2, 1):  # the first look reads
        sent.clear()
        found, is_sure = index.find_all(store, asked)
        assert (found.keys(), is_sure, len(sent)) == (expected, True, trips)
        for (queue, id), [place] in found.items():
            assert place.lists.queue == queue
            assert json.loads(place.ready.message)["headers"]["id"] == id
    publish(store, "late")
    assert index.find_all(store, {"q": ["late", "m1", "m2"]})[0].keys() == {
        ("q", "late"),
        ("q", "m1"),
        ("q", "m2"),
    }


def test_many_ids_that_others_have_moved(store: Store) -> None:
    index = ReadyIndex()
    publish(store, *names(0, 100))
    assert found(index, store, "m0") == ["m0"]
    pages = [each for page in ReadyLists(store, "q").pages() for each in page]
    ReadyLists(store, "q").withdraw(pages[20:60])  # the index is not informed
    asked = ["m0", "m10", "m30", "m50", "m80", "m99"]
    assert {id for _, id in index.find_all(store, {"q": asked})[0]} == {*asked} - {"m50"}


def test_a_list_that_is_too_long(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 30)
    publish(store, *names(0, 50))
    assert ReadyIndex().find(store, ["q"], "m0") == ([], False)


def test_two_that_share_an_id_and_a_server_that_has_lost_all(store: Store) -> None:
    index = ReadyIndex()
    publish(store, "a", "b", "a")
    assert found(index, store, "a") == ["a"]
    store.run("FLUSHDB")
    publish(store, "c")
    assert found(index, store, "c") == ["c"]
    assert found(index, store, "a") == []


def test_it_remembers_so_many_in_all(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_OF_ALL", 30)
    index = ReadyIndex()
    publish(store, *names(0, 20))
    store.publish("p", entries(*names(20, 40)))
    for id, queue in (("m0", "q"), ("m20", "p"), ("m1", "q")):
        messages, is_sure = index.find(store, [queue], id)
        assert (len(messages), is_sure) == (1, True)
    assert sum(len(each.numbers) for each in index._known.values()) <= 30


def test_a_fork_begins_anew(store: Store) -> None:
    index = ReadyIndex()
    publish(store, "a")
    assert found(index, store, "a") == ["a"]
    known = [*index._known.values()]
    for each in known:
        each.lock.acquire()  # by a thread that a child does not have
    index._pid = -1
    assert found(index, store, "a") == ["a"]
    for each in known:
        each.lock.release()
