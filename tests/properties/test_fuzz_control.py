"""Arbitrary data as arguments of the scripts that people and backups use."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from kombu_delayed.inspection.backlog import Backlog, Move
from kombu_delayed.store.keys import QueueKeys
from kombu_delayed.store.store import Entry, Store
from tests.kit.backlog import check_backlog
from tests.kit.restoring import kept, restore
from tests.kit.state import promoted
from tests.properties.test_fuzz import (
    LONGEST_MS,
    LURES,
    SERVER,
    Begin,
    ahead,
    finish,
    ids,
    letters,
    queues,
    records,
    sizes,
    take,
    unicode,
)

NOW_MS = 1000
ETA = "2030-01-02T03:04:05.000678+00:00"

#: Also long past, and so far ahead that no other time is.
times = st.integers(-LONGEST_MS, LONGEST_MS) | st.integers(NOW_MS - 2, NOW_MS + 3)


def fill(store: Store, queue: str, sent: Any, data: st.DataObject) -> dict[int, int]:
    """Schedule them; returns number of the message -> its due time."""
    dues = [data.draw(ahead) for _ in sent]
    entries = [Entry(*each, str(at)) for each, at in zip(sent, dues, strict=True)]
    assert store.schedule(queue, entries).delayed == len(sent)
    return dict(enumerate(dues))


def number(text: str | bytes) -> int:
    """The number of a text in `letters`; each has its own."""
    found: int = json.loads(text)["n"]
    return found


def numbers(store: Store, queue: str) -> dict[str, int]:
    """Member of the backlog -> number of its message."""
    found = store.client.hgetall(QueueKeys(queue).messages)
    return {name.decode(): number(text[text.index(b"{") :]) for name, text in found.items()}


def stands_for(id: str, member: str) -> bool:
    """Whether the backlog may use this member name for a message sent with this id."""
    before, _, n = member.rpartition("\x1f")
    return id == member or (id == before and n.isdigit())


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
@given(letters(), queues, st.data(), times, st.sampled_from(["", ETA]))
def test_reschedule(
    begin: Begin, sent: Any, queue: str, data: st.DataObject, at_ms: int, eta: str
) -> None:
    assume(not any('"eta":' in text for *_, text in sent))
    if data.draw(st.booleans()):
        sent = [(id, step, with_eta(text)) for id, step, text in sent]
    store = begin(data.draw(sizes))
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


@SERVER
@given(letters(), queues, st.data())
def test_restore(begin: Begin, sent: Any, queue: str, data: st.DataObject) -> None:
    store = begin(data.draw(sizes))
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


patterns = st.sampled_from(["[", "%d", "%", ".", "^", "$", "[^x]", "n.", ".-"])
needles = unicode | patterns | st.sampled_from([*LURES, '"', "\\u", "x" * 5000])
early = times | st.sampled_from([0, -1, -(2**60), NOW_MS])
late = times | st.sampled_from([2**54, 2**60])


@SERVER
@given(letters(), queues, st.data(), early, late)
def test_pages(
    begin: Begin, sent: Any, queue: str, data: st.DataObject, low_ms: int, high_ms: int
) -> None:
    store = begin(data.draw(sizes))
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
