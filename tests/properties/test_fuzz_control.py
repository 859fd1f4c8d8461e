"""Anything in the place of an argument of the scripts that people and backups use."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from kombu_delayed.inspection.backlog import Backlog, Move
from kombu_delayed.store.keys import QueueKeys
from kombu_delayed.store.store import Entry, Store
from tests.kit.backlog import check_backlog
from tests.kit.restoring import kept, restore, restore_dead
from tests.kit.state import note, promoted
from tests.properties.test_fuzz import (
    LONGEST_MS,
    LURES,
    SERVER,
    finish,
    ids,
    letters,
    queues,
    records,
    take,
    unicode,
)

NOW_MS = 1000
ETA = "2030-01-02T03:04:05.000678+00:00"

sizes = st.integers(2, 4)
ahead = st.integers(NOW_MS + 1, NOW_MS + 4) | st.integers(NOW_MS + 1, LONGEST_MS)
#: Also long past, and so far ahead that no other time is.
times = st.integers(-LONGEST_MS, LONGEST_MS) | st.integers(NOW_MS - 2, NOW_MS + 3)
keys = st.sampled_from(["k", "k\x1f2", "", "\0", "{k}", '"', "x" * 5000]) | unicode


def fill(store: Store, queue: str, sent: Any, data: st.DataObject) -> dict[int, int]:
    """Schedule them; returns number of the message -> its due time."""
    dues = [data.draw(ahead) for _ in sent]
    entries = [Entry(*each, str(at)) for each, at in zip(sent, dues, strict=True)]
    assert store.schedule(queue, entries).delayed == len(sent)
    return dict(enumerate(dues))


def number(text: str | bytes) -> int:
    """Which one of `letters` it is: each has its own."""
    found: int = json.loads(text)["n"]
    return found


def numbers(store: Store, queue: str) -> dict[str, int]:
    """Member of the backlog -> which message it is."""
    found = store.client.hgetall(QueueKeys(queue).messages)
    return {name.decode(): number(text[text.index(b"{") :]) for name, text in found.items()}


def stands_for(id: str, member: str) -> bool:
    """Whether the backlog may call a message so that was sent with this id."""
    before, _, n = member.rpartition("\x1f")
    return id == member or (id == before and n.isdigit())


# cancel


@SERVER
@given(letters(), queues, st.data(), sizes, st.lists(ids, max_size=3))
def test_cancel(
    begin: Callable[[int], Store],
    sent: Any,
    queue: str,
    data: st.DataObject,
    size: int,
    others: list[str],
) -> None:
    store = begin(size)
    fill(store, queue, sent, data)
    before = store.client.hgetall(QueueKeys(queue).messages)
    members = numbers(store, queue)
    names = data.draw(st.permutations([*others, *data.draw(some([id for id, *_ in sent]))]))
    counts = Backlog(store, queue).cancel(names)
    assert len(counts) == len(names)
    after = store.client.hgetall(QueueKeys(queue).messages)
    assert after.items() <= before.items()
    assert {name.decode() for name in after} == set(check_backlog(store.client, queue))
    gone = {name.decode() for name in before.keys() - after.keys()}
    assert sum(counts) == len(gone)
    assert all(any(stands_for(name, member) for name in names) for member in gone)
    wanted = {n for n, (id, *_) in enumerate(sent) if id in names}
    assert wanted <= {members[member] for member in gone}


@SERVER
@given(letters(), queues, st.data(), sizes, st.lists(ids, max_size=3))
def test_cancel_of_members(
    begin: Callable[[int], Store],
    sent: Any,
    queue: str,
    data: st.DataObject,
    size: int,
    others: list[str],
) -> None:
    store = begin(size)
    fill(store, queue, sent, data)
    there = set(numbers(store, queue))
    names = [*others, *data.draw(some(sorted(there)))]
    counts = Backlog(store, queue).cancel(names, members=True)
    assert counts == [int(name in there and name not in names[:n]) for n, name in enumerate(names)]
    assert set(check_backlog(store.client, queue)) == there - set(names)


def some(values: list[str]) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(values), max_size=4)


# reschedule


def with_eta(text: str) -> str:
    message = json.loads(text)
    message["headers"] = {"eta": "2020-01-01T00:00:00", **message["headers"]}
    return json.dumps(message)


def whereabouts(store: Store, queue: str) -> dict[int, tuple[str, str, Any]]:
    """Number of the message -> its name in the backlog or "", what precedes it, and itself."""
    names = QueueKeys(queue)
    found = [*store.client.hgetall(names.messages).items()]
    found += [(b"", text) for key in names.ready for text in store.client.lrange(key, 0, -1)]
    places = {}
    for name, text in found:
        front, brace, rest = text.decode().partition("{")
        message = json.loads(brace + rest)
        assert message["n"] not in places
        places[message["n"]] = name.decode(), front, message
    due_times = {name: int(front[1:]) for name, front, _ in places.values() if front}
    assert check_backlog(store.client, queue) == due_times
    return places


@SERVER
@given(letters(), queues, st.data(), sizes, times, st.sampled_from(["", ETA]))
def test_reschedule(
    begin: Callable[[int], Store],
    sent: Any,
    queue: str,
    data: st.DataObject,
    size: int,
    at_ms: int,
    eta: str,
) -> None:
    assume(not any('"eta":' in text for *_, text in sent))
    if data.draw(st.booleans()):
        sent = [(id, step, with_eta(text)) for id, step, text in sent]
    store = begin(size)
    fill(store, queue, sent, data)
    before, members = whereabouts(store, queue), data.draw(st.booleans())
    name = data.draw(ids | st.sampled_from([id for id, *_ in sent] + [*numbers(store, queue)]))
    relative = at_ms >= NOW_MS and data.draw(st.booleans())
    move = Move(name, f"+{at_ms - NOW_MS}" if relative else str(at_ms), eta)
    (count,) = Backlog(store, queue).reschedule([move], members=members)
    after = whereabouts(store, queue)
    moved = {n for n in after if after[n] != before[n]}
    named = {n for n in before if name == (before[n][0] if members else sent[n][0])}
    for n in moved | named:
        member, _, message = before[n]
        if eta and "eta" in message["headers"]:
            message["headers"]["eta"] = eta
        if at_ms > NOW_MS:
            assert after[n] == (member, f"{sent[n][1]}{at_ms}", message)
        else:
            assert after[n] == ("", "", {**message, "due_ms": at_ms})
        assert stands_for(name, member)
    assert before.keys() == after.keys()
    assert len(moved) <= count <= len(sent)
    assert (count > 0) >= bool(named)


# unique

CONFLICTS = ["refuse", "replace", "debounce", "retry"]


@SERVER
@given(letters(), queues, st.data(), sizes, keys)
def test_unique(
    begin: Callable[[int], Store],
    sent: Any,
    queue: str,
    data: st.DataObject,
    size: int,
    key: str,
) -> None:
    store = begin(size)
    gone: set[int] = set()
    holder: int | None = None
    for n, (id, step, text) in enumerate(sent):
        conflict, at_ms = data.draw(st.sampled_from(CONFLICTS)), data.draw(times)
        due = f"+{at_ms - NOW_MS}" if at_ms >= NOW_MS and data.draw(st.booleans()) else str(at_ms)
        before, waits = whereabouts(store, queue), at_ms > NOW_MS
        other = "" if holder is None else before[holder][0]
        answer = store.schedule_unique(queue, Entry(id, step, text, due), key, conflict)
        after = whereabouts(store, queue)
        if conflict == "retry":
            assert answer == ("stored", "")
            holder = None if other == id else holder
        elif holder is None:
            assert answer == ("stored", "")
            holder = n if waits else None
        elif conflict == "refuse":
            assert answer == ("refused", other)
            gone.add(n)
        elif conflict == "replace":
            assert answer == ("replaced", other)
            gone.add(holder)
            holder = n if waits else None
        else:
            assert answer == ("pushed", other)
            gone.add(n)
            assert after[holder][1] == (before[holder][1][:1] + str(at_ms) if waits else "")
            holder = holder if waits else None
        assert after.keys() == {*range(n + 1)} - gone
        if n not in gone:
            assert stands_for(id, after[n][0]) if waits else after[n][0] == ""
            assert after[n][1] == (f"{step}{at_ms}" if waits else "")
        found = store.client.hgetall(QueueKeys(queue).unique)
        expected = {} if holder is None else {key.encode(): after[holder][0].encode()}
        assert found == expected
    store.now = str(2 * LONGEST_MS)
    finish(store, queue, take(store, queue), spares="unique")


# restore


@SERVER
@given(letters(), queues, st.data(), sizes)
def test_restore(
    begin: Callable[[int], Store], sent: Any, queue: str, data: st.DataObject, size: int
) -> None:
    store = begin(size)
    names = data.draw(st.lists(ids, min_size=len(sent), max_size=len(sent), unique=True))
    dues = [data.draw(ahead | st.integers(0, NOW_MS)) for _ in sent]
    rows = [
        (name, kept(text, at_ms, step))
        for name, at_ms, (_, step, text) in zip(names, dues, sent, strict=True)
    ]
    assert restore(store, rows, queue) == (len(rows), 0)
    assert restore(store, data.draw(st.permutations(rows)), queue) == (0, len(rows))
    found = store.client.hgetall(QueueKeys(queue).messages)
    assert found == {name.encode(): record.encode() for name, record in rows}
    assert sorted(check_backlog(store.client, queue).values()) == sorted(dues)
    store.now = str(2 * LONGEST_MS)
    held = take(store, queue)
    expected = [(s, promoted(t, at)) for (_, s, t), at in zip(sent, dues, strict=True)]
    assert sorted(held.values()) == sorted(records(expected).elements())
    finish(store, queue, held, spares="unique")


@SERVER
@given(letters(), queues, st.data(), sizes)
def test_restore_among_others(
    begin: Callable[[int], Store], sent: Any, queue: str, data: st.DataObject, size: int
) -> None:
    """Each is there in the end, whatever has its name, and each that was there stays."""
    store = begin(size)
    half = len(sent) // 2
    fill(store, queue, sent[:half], data)
    before = store.client.hgetall(QueueKeys(queue).messages)
    rows = [(id, kept(text, data.draw(ahead), step)) for id, step, text in sent[half:]]
    assert restore(store, rows, queue) == (len(rows), 0)
    assert restore(store, rows, queue) == (0, len(rows))
    after = store.client.hgetall(QueueKeys(queue).messages)
    assert before.items() <= after.items()
    records_after = sorted(after.values())
    assert records_after == sorted([*before.values(), *(record.encode() for _, record in rows)])
    assert after.keys() == {name.encode() for name in check_backlog(store.client, queue)}


@SERVER
@given(letters(), queues, st.data(), unicode)
def test_restore_dead(
    begin: Callable[[int], Store], sent: Any, queue: str, data: st.DataObject, reason: str
) -> None:
    store = begin(4)
    rows = [
        (id, data.draw(st.integers(-5, LONGEST_MS)), f"{step}{text}", note(reason))
        for id, step, text in sent
    ]
    assert restore_dead(store, rows, queue) == (len(rows), 0)
    assert restore_dead(store, data.draw(st.permutations(rows)), queue) == (0, len(rows))
    names = store.dead.ids(queue)
    found = store.dead.letters(queue, names)
    assert sorted(each.message for each in found) == sorted(text.encode() for *_, text in sent)
    assert {each.reason for each in found} == {reason}
    assert store.dead.replay(queue, names) == len(sent)
    held = take(store, queue)
    assert sorted(held.values()) == sorted(record.encode() for _, _, record, _ in rows)
    finish(store, queue, held)


# page

patterns = st.sampled_from(["[", "%d", "%", ".", "^", "$", "[^x]", "n.", ".-"])
needles = unicode | patterns | st.sampled_from([*LURES, '"', "\\u", "x" * 5000])
early = times | st.sampled_from([0, -1, -(2**60), NOW_MS])
late = times | st.sampled_from([2**54, 2**60])


@SERVER
@given(letters(), queues, st.data(), sizes, early, late)
def test_pages(
    begin: Callable[[int], Store],
    sent: Any,
    queue: str,
    data: st.DataObject,
    size: int,
    low_ms: int,
    high_ms: int,
) -> None:
    store = begin(size)
    dues = fill(store, queue, sent, data)
    (_, _, text) = data.draw(st.sampled_from(sent))
    start = data.draw(st.integers(0, len(text)))
    needle = data.draw(needles | st.just(text[start : start + data.draw(st.integers(0, 9))]))
    pages = Backlog(store, queue).pages(low_ms, high_ms, needle, data.draw(st.integers(1, 5)))
    found = [each for page in pages for each in page]
    texts = {number(each.kept.message): each.kept.message.decode() for each in found}
    assert len(texts) == len(found)
    in_time = {n for n, at_ms in dues.items() if low_ms <= at_ms < high_ms}
    expected = {n for n in in_time if needle in sent[n][2]}
    assert expected <= texts.keys() <= in_time
    assert all(texts[n] == sent[n][2] for n in texts)
    # The step and the due time in front of a message are looked at as well.
    assert all(needle in f"{sent[n][1]}{dues[n]}{sent[n][2]}" for n in texts)
