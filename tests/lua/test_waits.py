"""The moves that carry out a policy's decision."""

from __future__ import annotations

import json

import pytest

from kombu_delayed.inspection.backlog import Backlog, Move
from kombu_delayed.message.envelope import open_envelope
from kombu_delayed.message.wait import Wait
from kombu_delayed.store.store import Store
from kombu_delayed.testing import dump
from tests.kit.claims import deliver
from tests.kit.state import entry, message

WAIT = Wait(900, 'say "{hello}", "headers":', ("spread", "x"), 2)


def claim(store: Store, tag: int = 1) -> list[bytes]:
    return [*deliver(store, tag=tag).records]


@pytest.mark.parametrize("due_ms", [None, 900])
def test_a_wait_stays_with_its_message(store: Store, due_ms: int | None) -> None:
    store.now = "0"
    if due_ms is None:
        store.publish("q", [entry("a")])
    else:
        store.schedule("q", [entry("a", due_ms)])
    store.now = "1000"
    (record,) = claim(store)
    assert store.park("q", "A", [(1, "a", 5_000)], WAIT) == 1
    assert store.park("q", "A", [(1, "a", 5_000)], WAIT) == 0
    (delayed,) = dump(store, "q")["delayed"]
    assert (delayed["id"], delayed["due_ms"]) == ("a", 5_000)
    assert Wait.in_message(delayed["message"].encode()) == WAIT
    store.now = "5000"
    (again,) = claim(store, 2)
    assert Wait.in_message(again[1:]) == WAIT
    assert json.loads(again[1:])["due_ms"] == 5_000
    # The next wait replaces this one.
    other = Wait(900, "other")
    assert store.park("q", "A", [(2, "a", 6_000)], other) == 1
    store.now = "6000"
    (last,) = claim(store, 3)
    assert last[1:].decode() == '{"due_ms":6000,' + other.put_into(message("a"))[1:]
    assert record[:1] == last[:1]


def test_the_count_of_deliveries_stays(store: Store) -> None:
    """Each message with an id is parked."""
    store.publish("q", [entry("a"), entry("a")])
    claim(store)
    store.release("q", "A", [1, 2], counted=True)
    claim(store, 2)
    assert store.park("q", "A", [(2, "a", 5_000), (3, "a", 5_000)], WAIT) == 2
    store.now = "5000"
    first, second = (open_envelope(record[1:], 3) for record in claim(store, 4))
    assert (first.deliveries, first.wait, first.first_due_ms) == (1, WAIT, 900)
    assert (second.deliveries, second.wait) == (1, WAIT)


def test_who_gives_it_another_due_time_ends_its_wait(store: Store) -> None:
    store.publish("q", [entry("a")])
    claim(store)
    store.park("q", "A", [(1, "a", 5_000)], WAIT)
    Backlog(store, "q").reschedule([Move("a", "7000")])
    (delayed,) = dump(store, "q")["delayed"]
    assert delayed["message"] == message("a")


def test_drop(store: Store) -> None:
    store.publish("q", [entry("a"), entry("b")])
    claim(store)
    for count in (1, 0):
        assert store.drop("q", "A", 1, "too old") == count
    assert store.drop("q", "A", 9, "too old", b"0{}") == 1
    assert [each["tag"] for each in dump(store, "q")["unacked"]] == [2]


@pytest.mark.parametrize("due_ms", [0, 8_000])
def test_a_replay_begins_anew(store: Store, due_ms: int) -> None:
    store.publish("q", [entry("a")])
    (record,) = claim(store)
    text = WAIT.put_into(record[1:].decode())
    store.bury("q", "A", [(1, "a", "no good", record[:1] + text.encode())])
    store.dead.replay("q", ["a"], due_ms)
    if due_ms:
        store.now = str(due_ms)
    (again,) = claim(store, 2)
    wait = Wait.in_message(again[1:])
    assert (wait.reason, wait.marks, wait.errors) == ("", (), 0)
    if due_ms:
        assert wait.first_due_ms == due_ms


@pytest.mark.parametrize(
    "text", ['{"wait":5,"b":1}', '{"wait":{"first_due_ms":"x","marks":7},"b":1}', '{"b":1}', ""]
)
def test_what_others_have_written_counts_for_nothing(text: str) -> None:
    found = Wait.in_message(text.encode())
    assert (found.first_due_ms, found.marks, found.errors) == (None, (), 0)
