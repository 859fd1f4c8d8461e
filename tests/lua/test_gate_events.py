"""What is told of messages that begin to wait at a gate."""

from __future__ import annotations

import pytest

from kombu_delayed.inspection.backlog import Backlog, Move
from kombu_delayed.inspection.events import newest
from kombu_delayed.message.ticket import Gate, LimitNumbers, Ticket, Use, put_ticket
from kombu_delayed.store.store import Delivered, Entry, Store
from tests.kit.state import message

GATE = Gate("v", (LimitNumbers("all", 1), LimitNumbers("für|wen", 2)))
USES = (Use("all"), Use("für|wen", "a b"))
FULL = "waits for the limit all"


@pytest.fixture(autouse=True)
def _events(store: Store) -> None:
    store.now, store.event_limit = "1000", 1_000


def entry(id: str, *uses: Use, due: str = "") -> Entry:
    text = message(id).replace("{", '{"headers": {"id": "' + id + '"},', 1)
    return Entry(id, 0, put_ticket(text, Ticket("k", uses=uses).text("v", id)), due)


def deliver(store: Store, tag: int, want: int = 9, gate: Gate = GATE) -> Delivered:
    answer = store.deliver("q", "A", want, tag, lease_ms=30_000, gate=gate)
    assert answer is not None
    return answer


def told(store: Store) -> list[tuple[str, str, str]]:
    """The events since the last call: name, id, reason."""
    found = [(each.event, each.id, each.reason) for each in newest(store, "q", 1_000)]
    store.run("DEL", store.keys("q").events)
    return found


def test_once_when_it_begins_to_wait(store: Store) -> None:
    store.publish("q", [entry(id, *USES) for id in "ab"])
    deliver(store, 1)
    assert told(store) == [("delivered", "a", ""), ("waiting", "b", FULL)]
    for tag in (2, 3):
        deliver(store, tag)
    assert told(store) == []
    store.now = "1001"
    store.publish("q", [entry("c", *USES)])
    deliver(store, 4)
    assert told(store) == [("waiting", "c", FULL)]
    store.free("q", "A", [1], on_error=lambda: pytest.fail("refused"))
    deliver(store, 4)
    assert told(store) == [("delivered", "b", "")]


def test_due_times_and_deliveries(store: Store) -> None:
    store.schedule("q", [entry(id, *USES, due="1500") for id in "ab"])
    told(store)
    store.now = "1600"
    deliver(store, 1)
    (event,) = [each for each in newest(store, "q", 9) if each.event == "waiting"]
    assert (event.id, event.due_ms, event.consumer, event.deliveries) == ("b", 1500, "", 0)


def test_the_reason_is_what_it_waits_for(store: Store) -> None:
    own = Use("für|wen", "a b")
    store.publish("q", [entry(id, own) for id in "abcd"])
    deliver(store, 1, want=1)
    reason = "waits for the limit für|wen of a b"
    assert told(store)[1:] == [("waiting", id, reason) for id in "cd"]
    deliver(store, 2)
    told(store)
    store.publish("q", [entry("e", own)])
    deliver(store, 3)
    assert told(store) == [("waiting", "e", reason)]
    assert Backlog(store, "q").reason("e") == reason


def test_what_has_room_and_only_waits_for_a_worker_is_not_told(store: Store) -> None:
    store.publish("q", [entry(id, Use("für|wen")) for id in "ab"])
    deliver(store, 1, want=1)
    assert told(store) == [("delivered", "a", "")]


ALL = LimitNumbers("all", 3)
PACE = LimitNumbers("all", 0, 1_000.0, 3)


@pytest.mark.parametrize("limit", [ALL, PACE], ids=["slots", "rate"])
@pytest.mark.parametrize("way", ["nobody takes any", "without tickets", "many lanes"])
def test_what_is_behind_those_that_have_room(store: Store, way: str, limit: LimitNumbers) -> None:
    gate, ids = Gate("v", (limit,)), "abcdefghij"
    tickets = {id: Ticket(id if way == "many lanes" else "", uses=(Use("all"),)) for id in ids}
    texts = {id: entry(id).message for id in ids}
    if way != "without tickets":
        texts |= {id: put_ticket(texts[id], tickets[id].text("v", id)) for id in ids}
    else:
        texts = {id: text.replace('"ticket":"v', '"ticket":"u') for id, text in texts.items()}
    store.publish("q", [Entry(id, 0, text) for id, text in texts.items()])
    deliver(store, 1, 0 if way == "nobody takes any" else 2 if way == "many lanes" else 10, gate)
    if way == "without tickets":
        told(store)
        held = [(n, tickets[id].text("v", id), b"") for n, id in enumerate(ids, 1)]
        assert store.admit("q", "A", held, gate) == 10
    left = [id for event, id, _ in told(store) if event == "waiting"]
    assert left == [*"defghij"]


def test_what_is_behind_those_that_came_before(store: Store) -> None:
    gate = Gate("v", (ALL,))
    for part in ("ab", "cd"):
        store.publish("q", [entry(id, Use("all")) for id in part])
        deliver(store, 1, 0, gate)
    assert told(store) == [("waiting", "d", FULL)]


def test_a_limit_without_a_name(store: Store) -> None:
    store.publish("q", [entry(id, Use("")) for id in "ab"])
    answer = deliver(store, 1, gate=Gate("v", (LimitNumbers("", 1),)))
    assert len(answer.records) == 1
    assert told(store) == [("delivered", "a", ""), ("waiting", "b", "waits for the limit ")]


def test_what_needs_no_room_is_not_told(store: Store) -> None:
    store.publish("q", [entry("a", Use("all")), entry("b", Use("all", passes=True))])
    deliver(store, 1, want=1)
    assert [name for name, id, _ in told(store) if id == "b"] == []


def test_turns_alone_are_not_told(store: Store) -> None:
    store.publish("q", [entry(id) for id in "abc"])
    deliver(store, 1, want=1)
    assert told(store) == [("delivered", "a", "")]


def test_what_comes_without_a_ticket(store: Store) -> None:
    store.publish("q", [entry("a", *USES)])
    deliver(store, 1)
    store.publish("q", [Entry("b", 0, entry("b").message.replace('"ticket":"v', '"ticket":"u'))])
    deliver(store, 2)
    told(store)
    store.admit("q", "A", [(2, Ticket("k", uses=USES).text("v", "b"), b"")], GATE)
    deliver(store, 3)
    assert [name for name, id, _ in told(store) if id == "b"] == ["waiting"]


def test_again_when_it_waits_again(store: Store) -> None:
    store.publish("q", [entry(id, *USES) for id in "ab"])
    deliver(store, 1)
    told(store)
    Backlog(store, "q").reschedule([Move("b", "+0")])
    deliver(store, 2)
    assert told(store) == [("rescheduled", "b", ""), ("waiting", "b", FULL)]


def test_none_are_told_where_none_are_kept(store: Store) -> None:
    store.event_limit = 0
    store.publish("q", [entry(id, *USES) for id in "ab"])
    deliver(store, 1)
    assert told(store) == []
