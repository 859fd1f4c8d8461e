"""The events of messages that begin to wait at a gate."""

from __future__ import annotations

import pytest

from kombu_delayed.inspection.backlog import Backlog, Move
from kombu_delayed.inspection.events import newest
from kombu_delayed.message.ticket import Gate, LimitNumbers, Ticket, Use, put_ticket
from kombu_delayed.store.claimable import Delivered
from kombu_delayed.store.store import Entry, Store
from tests.kit.claims import deliver, free
from tests.kit.state import message

GATE = Gate("v", (LimitNumbers("all", 1), LimitNumbers("für|wen", 2)))
USES = (Use("all"), Use("für|wen", "a b"))
FULL = "waits for the limit all"


@pytest.fixture(autouse=True)
def _events(store: Store) -> None:
    store.event_limit = 1_000


def entry(id: str, *uses: Use, key: str = "k", version: str = "v") -> Entry:
    text = message(id).replace("{", '{"headers": {"id": "' + id + '"},', 1)
    return Entry(id, 0, put_ticket(text, Ticket(key, uses=uses).text(version, id)))


def claim(store: Store, tag: int, want: int = 9, gate: Gate = GATE) -> Delivered:
    return deliver(store, "A", want, tag, gate=gate)


def told(store: Store) -> list[tuple[str, str, str]]:
    """The events since the last call: name, id, reason."""
    found = [(each.event, each.id, each.reason) for each in newest(store, "q", 1_000)]
    store.run("DEL", store.keys("q").events)
    return found


def test_once_when_it_begins_to_wait(store: Store) -> None:
    store.publish("q", [entry(id, *USES) for id in "ab"])
    claim(store, 1)
    assert told(store) == [("delivered", "a", ""), ("waiting", "b", FULL)]
    for tag in (2, 3):
        claim(store, tag)
    assert told(store) == []
    store.now = "1001"
    store.publish("q", [entry("c", *USES)])
    claim(store, 4)
    assert told(store) == [("waiting", "c", FULL)]
    free(store, 1)
    claim(store, 4)
    assert told(store) == [("delivered", "b", "")]


def test_the_reason_is_what_it_waits_for(store: Store) -> None:
    own = Use("für|wen", "a b")
    store.publish("q", [entry(id, own) for id in "abcd"])
    claim(store, 1, want=1)
    reason = "waits for the limit für|wen of a b"
    assert told(store)[1:] == [("waiting", id, reason) for id in "cd"]
    claim(store, 2)
    told(store)
    store.publish("q", [entry("e", own)])
    claim(store, 3)
    assert told(store) == [("waiting", "e", reason)]
    assert Backlog(store, "q").reason("e") == reason


ALL = LimitNumbers("all", 3)
PACE = LimitNumbers("all", 0, 1_000.0, 3)


@pytest.mark.parametrize("limit", [ALL, PACE], ids=["slots", "rate"])
@pytest.mark.parametrize("way", ["nobody takes any", "other tickets", "many lanes"])
def test_what_is_behind_those_that_have_room(store: Store, way: str, limit: LimitNumbers) -> None:
    gate, ids, use = Gate("v", (limit,)), "abcdefghij", Use("all")
    if way == "other tickets":
        store.publish("q", [entry(id, version="u") for id in ids])
        claim(store, 1, 10, gate)
        ticket = Ticket(uses=(use,))
        held = [(tag, ticket.text("v", id), b"") for tag, id in enumerate(ids, 1)]
        assert store.admit("q", "A", held, gate) == 10
    else:
        lanes = way == "many lanes"
        store.publish("q", [entry(id, use, key=id if lanes else "") for id in ids])
        claim(store, 1, 2 if lanes else 0, gate)
    left = [id for event, id, _ in told(store) if event == "waiting"]
    assert left == [*"defghij"]


def test_what_is_behind_those_that_came_before(store: Store) -> None:
    gate = Gate("v", (ALL,))
    for part in ("ab", "cd"):
        store.publish("q", [entry(id, Use("all")) for id in part])
        claim(store, 1, 0, gate)
    assert told(store) == [("waiting", "d", FULL)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param([Use("für|wen")], [Use("für|wen")], id="there is room"),
        pytest.param([Use("all")], [Use("all", passes=True)], id="it needs no room"),
        pytest.param([], [], id="turns alone"),
    ],
)
def test_what_only_waits_for_a_worker_is_not_told(
    first: list[Use], second: list[Use], store: Store
) -> None:
    store.publish("q", [entry("a", *first), entry("b", *second)])
    claim(store, 1, want=1)
    assert told(store) == [("delivered", "a", "")]


def test_again_when_it_waits_again(store: Store) -> None:
    store.publish("q", [entry(id, *USES) for id in "ab"])
    claim(store, 1)
    told(store)
    Backlog(store, "q").reschedule([Move("b", "+0")])
    claim(store, 2)
    assert told(store) == [("rescheduled", "b", ""), ("waiting", "b", FULL)]


def test_none_are_told_where_none_are_kept(store: Store) -> None:
    store.event_limit = 0
    store.publish("q", [entry(id, *USES) for id in "ab"])
    claim(store, 1)
    assert told(store) == []
