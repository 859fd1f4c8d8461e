"""The moves that carry out a policy's decision."""

from __future__ import annotations

import json

import pytest

from kombu_delayed.inspection.backlog import Backlog, Move
from kombu_delayed.message.envelope import open_envelope
from kombu_delayed.message.wait import Wait
from kombu_delayed.store.store import Store
from kombu_delayed.testing import dump
from tests.kit.state import entry, message

WAIT = Wait(900, 'say "{hello}", "headers":', ("spread", "x"), 2)


@pytest.fixture(autouse=True)
def _time_stands_still(store: Store) -> None:
    store.now = "1000"


def deliver(store: Store, tag: int = 1) -> list[bytes]:
    answer = store.deliver("q", "A", 9, tag=tag, lease_ms=30_000)
    assert answer is not None
    return list(answer.records)


@pytest.mark.parametrize("due_ms", [None, 900])
def test_a_wait_stays_with_its_message(store: Store, due_ms: int | None) -> None:
    store.publish("q", [entry("a")])
    if due_ms is not None:
        store.now = "0"
        store.purge("q")
        store.schedule("q", [entry("a", due_ms)])
        store.now = "1000"
    (record,) = deliver(store)
    assert store.park("q", "A", [(1, "a", 5_000)], WAIT) == 1
    assert store.park("q", "A", [(1, "a", 5_000)], WAIT) == 0
    (delayed,) = dump(store, "q")["delayed"]
    assert (delayed["id"], delayed["due_ms"]) == ("a", 5_000)
    assert Wait.in_message(delayed["message"].encode()) == WAIT
    store.now = "5000"
    (again,) = deliver(store, 2)
    assert Wait.in_message(again[1:]) == WAIT
    assert json.loads(again[1:])["due_ms"] == 5_000
    # The next wait takes the place of this one.
    other = Wait(900, "other")
    assert store.park("q", "A", [(2, "a", 6_000)], other) == 1
    store.now = "6000"
    (last,) = deliver(store, 3)
    assert last[1:].decode() == '{"due_ms":6000,' + other.put_into(message("a"))[1:]
    assert record[:1] == last[:1]


def test_each_message_with_an_id_is_parked(store: Store) -> None:
    store.publish("q", [entry("a"), entry("a")])
    deliver(store)
    assert store.park("q", "A", [(1, "a", 5_000), (2, "a", 5_000)], WAIT) == 2
    assert len(dump(store, "q")["delayed"]) == 2


def test_the_count_of_deliveries_stays(store: Store) -> None:
    store.publish("q", [entry("a")])
    deliver(store)
    store.release("q", "A", [1], counted=True)
    deliver(store, 2)
    store.park("q", "A", [(2, "a", 5_000)], WAIT)
    store.now = "5000"
    (record,) = deliver(store, 3)
    envelope = open_envelope(record[1:], 3)
    assert (envelope.deliveries, envelope.wait, envelope.first_due_ms) == (1, WAIT, 900)


def test_who_gives_it_another_due_time_ends_its_wait(store: Store) -> None:
    store.publish("q", [entry("a")])
    deliver(store)
    store.park("q", "A", [(1, "a", 5_000)], WAIT)
    Backlog(store, "q").reschedule([Move("a", "7000")])
    (delayed,) = dump(store, "q")["delayed"]
    assert delayed["message"] == message("a")


def test_drop(store: Store) -> None:
    store.publish("q", [entry("a"), entry("b")])
    deliver(store)
    assert store.drop("q", "A", 1, "too old") == 1
    assert store.drop("q", "A", 1, "too old") == 0
    assert store.drop("q", "A", 9, "too old", b"0{}") == 1
    assert [each["tag"] for each in dump(store, "q")["unacked"]] == [2]


@pytest.mark.parametrize("due_ms", [0, 8_000])
def test_a_replay_begins_anew(store: Store, due_ms: int) -> None:
    store.publish("q", [entry("a")])
    (record,) = deliver(store)
    text = WAIT.put_into(record[1:].decode())
    store.bury("q", "A", [(1, "a", "no good", record[:1] + text.encode())])
    store.dead.replay("q", ["a"], due_ms)
    if due_ms:
        store.now = str(due_ms)
    (again,) = deliver(store, 2)
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
