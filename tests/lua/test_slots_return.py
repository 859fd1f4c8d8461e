"""A consumer gives slots back with acks where it can, and never late."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from kombu_delayed.consumer.lease.standstill import Progress, Unbegun
from kombu_delayed.inspection.gate_usage import slots_in_use
from kombu_delayed.store.store import Entry, Store
from tests.crash.dying import Reader
from tests.kit import claims
from tests.kit.state import message

pytestmark = pytest.mark.usefixtures("no_keeper")

#: The calls that a store receives: ("ack", tags, freed) and ("free", tags).
Told = list[tuple[Any, ...]]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [1000.0]
    monkeypatch.setattr("kombu_delayed.consumer.outbox.monotonic", lambda: clock[0])
    return clock


@pytest.fixture
def told(store: Store, monkeypatch: pytest.MonkeyPatch) -> Told:
    told: Told = []

    def ack(queue: str, consumer: str, tags: Any, on_error: Any, freed: Any = ()) -> None:
        told.append(("ack", [*tags], [*freed]))

    def free(queue: str, consumer: str, tags: Any, on_error: Any) -> None:
        told.append(("free", [*tags]))

    monkeypatch.setattr(store, "ack", ack)
    monkeypatch.setattr(store, "free", free)
    return told


def reader_of(store: Store, *, ends_here: bool = False) -> Reader:
    """A reader that has taken messages 1 and 2, which have slots, and knows of more."""
    reader = Reader(store, prefetch_count=2)
    store.publish("q", [Entry(id, 0, message(id)) for id in "abcd"])
    tags = itertools.count(1)

    def hand_over(payload: dict[str, Any], queue: str) -> None:
        reader.got.append(payload)
        tag = next(tags)
        reader.qos.slots.occupy(tag, "q", b"{}", {})
        reader.qos.slots.keep(tag)
        if ends_here:
            reader.qos.slots.task_ended(tag)

    reader.consumer.session.hand_over = hand_over
    reader.read()
    assert len(reader.got) == 2
    return reader


def test_slots_do_not_wait_for_long(store: Store, clock: list[float], told: Told) -> None:
    reader = reader_of(store)
    reader.qos.slots.task_ended(1)
    assert reader.consumer.step() <= clock[0] + 0.003
    clock[0] += 0.002
    reader.qos.slots.task_ended(2)
    reader.consumer.step()
    assert told == []
    clock[0] += 0.0011
    reader.consumer.step()
    assert told == [("free", [1, 2])]


def test_slots_of_tasks_that_ran_in_this_thread_do_not_wait(
    store: Store, clock: list[float], told: Told
) -> None:
    """The next one may take an hour."""
    reader = reader_of(store, ends_here=True)
    reader.consumer.step()
    assert told == [("free", [1]), ("free", [2])]


#: More arguments than a script of the server can take as a list.
MANY = 8_001


def test_a_consumer_may_have_very_many_running_tasks(store: Store) -> None:
    """It restores their slots on a server that has lost them, and leaves while they run."""
    claims.deliver(store)
    store.leases.keep_slots("q", "A", [(n, f"m{n}", "|all:*1") for n in range(MANY)])
    assert slots_in_use(store, "q") == {"all:": MANY}
    store.leases.leave("q", "A", range(MANY))
    assert slots_in_use(store, "q") == {"all:": MANY}
    store.leases.leave("q", "A", [7])
    assert slots_in_use(store, "q") == {"all:": 1}


def test_a_stuck_consumer_gives_very_many_messages_back(store: Store) -> None:
    claims.deliver(store)
    store.leases.keep_slots("q", "A", [(n, f"m{n}", "|all:*1") for n in range(MANY)])
    unbegun = [Unbegun("q", n, has_slots=True) for n in range(MANY)]
    clock = itertools.count(0.0, 10.0)
    progress = Progress(5.0, lambda: next(clock), lambda: unbegun, lambda *_: None, lambda: ())
    progress.check(store, "A")
    assert slots_in_use(store, "q") == {}
    assert progress.taken == []
