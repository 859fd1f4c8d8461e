"""Arbitrary data as a message, a header or an argument of the scripts."""

from __future__ import annotations

import copy
import json
import re
import string
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kombu_delayed.errors import MessageError
from kombu_delayed.message.envelope import Due, Envelope, due, eta_to_ms, open_envelope
from kombu_delayed.store.store import Entry, Store
from tests.kit.backlog import check_backlog
from tests.kit.state import all_keys, promoted, returned

Begin = Callable[[int], Store]

#: The largest number that Redis returns whole and sorted sets keep exactly.
LONGEST_MS = 2**53

SERVER = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

# JSON.

KOMBU_TYPES = ["datetime", "date", "time", "decimal", "uuid", "bytes", "base64"]
any_text = st.text(st.characters(), max_size=20)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | any_text
    | st.sampled_from(["eta", "__type__", "__value__", "datetime", "decimal", "uuid", "bytes"])
)
member_names = any_text | st.sampled_from(
    ["id", "eta", "x-delay", "delivery_info", "delivery_tag", "due_ms", "__type__", "__value__"]
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(member_names, inner, max_size=4)
        | st.fixed_dictionaries(
            {
                "__type__": any_text | st.sampled_from(KOMBU_TYPES),
                "__value__": inner,
            }
        )
    ),
    max_leaves=12,
)

MESSAGE: dict[str, Any] = {
    "body": "x",
    "content-encoding": "utf-8",
    "content-type": "application/json",
    "headers": {"id": "task", "eta": "2026-01-01T12:00:00", "x-delay": 5},
    "properties": {"delivery_tag": "t", "message_id": "m", "delivery_info": {"routing_key": "q"}},
    "due_ms": 1000,
    "deliveries": 2,
}
PATHS = [
    *((name,) for name in MESSAGE),
    *(("headers", name) for name in MESSAGE["headers"]),
    *(("properties", name) for name in MESSAGE["properties"]),
]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A message in which some members have other values, or are missing."""
    message = copy.deepcopy(MESSAGE)
    for *parents, name in draw(st.lists(st.sampled_from(PATHS), max_size=4)):
        owner: Any = message
        for parent in parents:
            owner = owner.get(parent) if isinstance(owner, dict) else None
        if isinstance(owner, dict):
            if draw(st.booleans()):
                owner[name] = draw(values)
            else:
                owner.pop(name, None)
    return json.dumps(message).encode()


@st.composite
def spliced(draw: st.DrawFn) -> bytes:
    """A message in which some bytes were replaced."""
    text = draw(mutated())
    at = draw(st.integers(0, len(text)))
    return text[:at] + draw(st.binary(max_size=8)) + text[at + draw(st.integers(0, 8)) :]


def opened(text: bytes) -> Envelope | MessageError:
    try:
        return open_envelope(text, 7)
    except MessageError as error:
        return error


def check_envelope(text: bytes) -> None:
    envelope = opened(text)
    if isinstance(envelope, MessageError):
        assert 0 < len(str(envelope).encode()) < 2500
        return
    assert isinstance(envelope, Envelope)
    envelope.id.encode()
    assert envelope.payload["properties"]["delivery_tag"] == 7
    assert isinstance(envelope.payload["headers"], dict)
    assert isinstance(envelope.payload["properties"]["delivery_info"], dict)
    assert envelope.due_ms is None or type(envelope.due_ms) is int
    assert type(envelope.deliveries) is int
    check_due(envelope.payload)


def check_due(message: dict[str, Any]) -> None:
    when = due(message)
    if when is not None:
        assert isinstance(when, Due)
        assert re.fullmatch(r"-?\d+|\+\d+", when.argument)
        assert abs(int(when.argument)) < LONGEST_MS - 2 * 10**12


@given(
    st.binary()
    | st.builds(str.encode, st.text())
    | values.map(lambda v: json.dumps(v).encode())
    | mutated()
    | spliced()
)
def test_anything_in_the_place_of_a_message(text: bytes) -> None:
    check_envelope(text)


@pytest.mark.parametrize("shape", ["[]", '{"x":}', '{"__type__":}'])
@pytest.mark.parametrize("member", ["id", "eta", "x-delay"])
def test_any_depth(shape: str, member: str) -> None:
    """A text just below the depth limit of decoding must also be printable."""
    for depth in range(1, 1500, 7):
        value = shape[:-1] * depth + "1" + shape[-1] * depth
        check_envelope(b'{"properties":{},"headers":{"%s":%s}}' % (member.encode(), value.encode()))


@given(eta=values, delay=values)
def test_any_headers(eta: Any, delay: Any) -> None:
    check_due({"headers": {"eta": eta}})
    check_due({"headers": {"x-delay": delay}})
    check_due({"headers": {"eta": eta, "x-delay": delay}})


# Times.

offsets = st.integers(-86_399, 86_399).map(lambda s: timezone(timedelta(seconds=s)))
aware = st.datetimes(timezones=offsets)
DATE = r"\d{4}-?(\d\d-?\d\d|W\d\d-?\d|\d{3})"
TIME = r"\d\d(:?\d\d){0,2}([.,]\d{1,12})?(Z|[+-]\d\d:?\d\d)?"
iso_like = st.text(string.digits + "-:TtZzW+., ", max_size=40) | st.from_regex(
    rf"\A{DATE}[T ]{TIME}\Z"
)


def exact_ms(moment: datetime) -> int:
    """Its milliseconds since the epoch, rounded up, in integer arithmetic."""
    epoch = datetime(1970, 1, 1, tzinfo=timezone.utc)
    micros = (moment - epoch) // timedelta(microseconds=1)
    return -(-micros // 1000)


@given(aware)
def test_time_there_and_back(moment: datetime) -> None:
    assert eta_to_ms(moment) == exact_ms(moment)
    assert eta_to_ms(moment.isoformat()) == exact_ms(moment)
    assert due({"headers": {"eta": moment.isoformat()}}) == Due(at_ms=exact_ms(moment))


@given(st.datetimes())
def test_time_without_a_zone_is_utc(moment: datetime) -> None:
    expected = exact_ms(moment.replace(tzinfo=timezone.utc))
    assert eta_to_ms(moment) == eta_to_ms(moment.isoformat()) == expected


@given(iso_like | any_text)
@example("9999-12-31T24:00:00")
@example("0001-01-01T00:00:00+23:59")
def test_text_that_looks_like_a_time(text: str) -> None:
    try:
        at_ms = eta_to_ms(text)
    except ValueError:
        assert due({"headers": {"eta": text}}) is None
    else:
        assert due({"headers": {"eta": text}}) == Due(at_ms=at_ms)
        assert -62_135_683_200_000 <= at_ms <= 253_402_387_200_000


# Arguments of the scripts. Redis has bytes: any text but lone surrogates, which JSON escapes.

unicode = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
TRAPS = [
    "", "a", "a\x1f2", "a\x1f3", "\x1f2", "a\x1f2\x1f2", "{x}", "a\nb", "a\0b", "%s", "%1", "%",
    "-", "'", "+5", "-inf", "(1", "x" * 5000,
]  # fmt: skip
LURES = [
    '"delivery_tag": "t"', ',"deliveries":3}', ',"due_ms":5,', "}", "}}", "{", "%1", "%d+", "\0",
    '","deliveries":3}', "\\", '\\"', "[^\"]*", "\x1f2",
]  # fmt: skip
ids = st.sampled_from(["a", "a\x1f2", "a\x1f3"]) | st.sampled_from(TRAPS) | unicode
fields = st.dictionaries(
    unicode | st.sampled_from(LURES) | st.sampled_from(["delivery_tag", "body", "x"]),
    unicode | st.sampled_from(LURES) | st.integers() | st.none() | st.lists(st.sampled_from(LURES)),
    min_size=1,
    max_size=4,
)
sizes = st.integers(2, 4)
ahead = st.integers(1001, 1004) | st.integers(1001, LONGEST_MS)
queues = st.sampled_from(["q", "a{b}c", "{}", "}{", "a b", "q\n", "\0", "ü", "%d", "*"])


@st.composite
def letters(draw: st.DrawFn) -> list[tuple[str, int, str]]:
    """Ids, priority steps and texts; each text occurs once."""
    found = []
    for n in range(draw(st.integers(1, 8))):
        members = {**draw(fields), "n": n, "headers": draw(fields)}
        compact = draw(st.booleans())
        separators = (",", ":") if compact else (", ", ": ")
        text = json.dumps(members, ensure_ascii=draw(st.booleans()), separators=separators)
        found.append((draw(ids), draw(st.sampled_from([0, 3, 6, 9])), text))
    return found


def take(store: Store, queue: str) -> dict[int, bytes]:
    """Deliver all messages; returns tag -> record."""
    answer = store.deliver(queue, "A", 1000, 1, lease_ms=100)
    assert answer is not None
    held = dict(enumerate(answer.records, 1))
    assert store.leases.recover(queue, "A", 0) == list(held.items())
    return held


def finish(store: Store, queue: str, held: dict[int, bytes], spares: str = "wake") -> None:
    """Ack all; nothing is left except wake tokens and keys with `spares` in their names."""
    store.ack(queue, "A", [*held, 10**9], on_error=lambda: pytest.fail("an ack was refused"))
    store.leases.leave(queue, "A")
    assert store.size(queue) == (0, 0, 0)
    left = [key.rpartition(":")[2] for key in all_keys(store.client)]
    assert [name for name in left if name != "wake" and spares not in name] == []


def records(found: list[tuple[int, str]]) -> Counter[bytes]:
    return Counter(f"{step}{text}".encode() for step, text in found)


@SERVER
@given(letters(), queues, st.data())
def test_scheduled_messages_come_back(
    begin: Begin, sent: Any, queue: str, data: st.DataObject
) -> None:
    store = begin(data.draw(sizes))
    dues = [data.draw(ahead) for _ in sent]
    fixed = data.draw(st.booleans())
    entries = [
        Entry(id, step, text, str(at) if fixed else f"+{at - 1000}")
        for (id, step, text), at in zip(sent, dues, strict=True)
    ]
    assert store.schedule(queue, entries) == (len(sent), 0, 0)
    assert sorted(check_backlog(store.client, queue).values()) == sorted(dues)
    if fixed:
        assert store.schedule(queue, entries) == (0, 0, len(sent))
    store.now = str(max(dues))
    held = take(store, queue)
    expected = [(s, promoted(t, at)) for (_, s, t), at in zip(sent, dues, strict=True)]
    assert Counter(held.values()) == records(expected)
    finish(store, queue, held)


@SERVER
@given(letters(), queues, st.data())
def test_messages_survive_whatever_happens_to_them(
    begin: Begin, sent: Any, queue: str, data: st.DataObject
) -> None:
    """They are returned, parked, buried and replayed."""
    store = begin(data.draw(sizes))
    store.publish(queue, [Entry("", step, text) for _, step, text in sent])
    times = data.draw(st.integers(1, 3))
    for n in range(times):
        held = take(store, queue)
        store.now = str(int(store.now) + 100)
        if data.draw(st.booleans()):
            assert store.leases.reclaim(queue, "A") == len(sent), n
        else:
            assert store.release(queue, "A", held, counted=True) == len(sent), n
    held = take(store, queue)
    by_step = sorted(sent, key=lambda each: each[1])
    expected = [(step, returned(text, times)) for _, step, text in by_step]
    assert list(held.values()) == [f"{step}{text}".encode() for step, text in expected]

    parked = [
        (tag, data.draw(ids), data.draw(ahead)) for tag in data.draw(st.permutations([*held]))
    ]
    assert store.park(queue, "A", [*parked, *parked, (10**9, "x", 5)]) == len(sent)
    assert sorted(check_backlog(store.client, queue).values()) == sorted(at for *_, at in parked)
    store.now = str(max(at for *_, at in parked))
    again = take(store, queue)
    assert Counter(again.values()) == records(
        [(step, promoted(text, at)) for tag, _, at in parked for step, text in [expected[tag - 1]]]
    )

    graves = [(tag, data.draw(ids), data.draw(unicode), b"") for tag in again]
    assert store.bury(queue, "A", [*graves, *graves, (10**9, "x", "y", b"")]) == len(sent)
    found = store.dead.letters(queue, store.dead.ids(queue))
    assert Counter(letter.message for letter in found) == Counter(r[1:] for r in again.values())
    assert sorted(letter.reason for letter in found) == sorted(why for _, _, why, _ in graves)
    assert all(letter.deliveries == times + 1 for letter in found)
    at_ms = data.draw(st.just(0) | ahead)
    names = [letter.id for letter in found]
    assert store.dead.replay(queue, [*names, *names, "\x1f" * 9], at_ms) == len(sent)
    assert len(check_backlog(store.client, queue)) == (len(sent) if at_ms else 0)
    store.now = str(LONGEST_MS)
    last = take(store, queue)
    due_times = {tag: at_ms or at for tag, _, at in parked}
    texts = [(step, promoted(text, due_times[n])) for n, (_, step, text) in enumerate(by_step, 1)]
    assert Counter(last.values()) == records(texts)
    finish(store, queue, last)
