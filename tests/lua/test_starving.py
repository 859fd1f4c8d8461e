"""No message waits at a gate for longer than the messages before it need."""

from __future__ import annotations

import pytest

from kombu_delayed.inspection.backlog import Backlog
from kombu_delayed.message.ticket import Gate, LimitNumbers, Ticket, Use
from kombu_delayed.store.store import Store
from tests.kit.claims import bodies, deliver, free
from tests.lua.test_gate import entry, faults

SLOW = LimitNumbers("late", 0, 60_000.0, 1, after_ms=500)
LATE = Ticket("k", uses=(Use("late"),))


class Worker:
    """Claims through a gate, with a tag for each message."""

    def __init__(self, store: Store, gate: Gate) -> None:
        self.store, self.gate = store, gate
        self.tag = 0

    def claim(self, want: int = 9) -> str:
        found = bodies(deliver(self.store, "A", want, self.tag + 1, gate=self.gate))
        self.tag += len(found)
        return "".join(found)


def be_late(store: Store, ids: str, ticket: Ticket = LATE) -> None:
    store.schedule("q", [entry(id, ticket, str(1001 + n)) for n, id in enumerate(ids)])
    store.now = "10000"


def test_who_is_not_late_does_not_wait_behind_the_late_ones(store: Store) -> None:
    worker = Worker(store, Gate("v", (SLOW,)))
    be_late(store, "abc")
    store.publish("q", [entry(id, LATE) for id in "xy"])
    assert worker.claim() == "axy"
    store.publish("q", [entry("z", LATE)])  # while all that are there wait for a token
    assert worker.claim() == "z"
    assert worker.claim() == ""
    store.now = "70000"
    assert worker.claim() == "b"
    assert faults(store) == {}


def test_who_is_not_late_comes_after_a_late_one_that_has_a_token(store: Store) -> None:
    worker = Worker(store, Gate("v", (SLOW,)))
    be_late(store, "ab")
    store.publish("q", [entry("x", LATE)])
    assert [worker.claim(1) for _ in range(3)] == ["a", "x", ""]


def test_a_cancelled_one_stands_in_nobodys_way(store: Store) -> None:
    worker = Worker(store, Gate("v", (SLOW,)))
    be_late(store, "ab")
    store.publish("q", [entry(id, LATE) for id in "xyz"])
    assert worker.claim(1) == "a"
    assert Backlog(store, "q").cancel(["x", "y"]) == [1, 1]
    assert worker.claim() == "z"
    assert Backlog(store, "q").cancel(["b"]) == [1]
    assert worker.claim() == ""


def test_who_is_not_late_waits_for_its_other_limits(store: Store) -> None:
    worker = Worker(store, Gate("v", (SLOW, LimitNumbers("all", 1))))
    ticket = Ticket("k", uses=(Use("late"), Use("all")))
    be_late(store, "ab", ticket)
    store.publish("q", [entry("x", ticket)])
    assert worker.claim() == "a"
    free(store, 1)
    assert worker.claim() == "x"
    free(store, 2)
    assert worker.claim() == ""
    store.now = "70000"
    assert worker.claim() == "b"


def test_newcomers_go_behind_a_key_that_has_not_had_its_turn(store: Store) -> None:
    worker = Worker(store, Gate("v"))
    store.publish("q", [entry(id, Ticket(id)) for id in "zyx"])
    order = ""
    for newcomers in ("ab", "cd", "ef"):
        store.publish("q", [entry(id, Ticket(id)) for id in newcomers])
        order += worker.claim(1)
    assert order == "zyx"
    assert worker.claim() == "abcdef"


@pytest.mark.parametrize("fair", ["", "h"])
@pytest.mark.parametrize("is_rate", [False, True])
def test_a_heavy_one_gets_its_room_though_others_keep_coming(
    fair: str, is_rate: bool, store: Store
) -> None:
    limit = LimitNumbers("all", 0, 1000.0, 2) if is_rate else LimitNumbers("all", 2)
    worker = Worker(store, Gate("v", (limit,)))
    store.publish("q", [entry(id, Ticket(id, uses=(Use("all"),))) for id in "ab"])
    assert worker.claim() == "ab"
    store.publish("q", [entry("H", Ticket(fair, uses=(Use("all", cost=2),)))])
    assert worker.claim() == ""
    order = ""
    for n, id in enumerate("cdefg", 1):
        store.publish("q", [entry(id, Ticket(id, uses=(Use("all"),)))])
        store.now = str(1000 + 1000 * n)
        if not is_rate:
            free(store, n)
        order += worker.claim()
    assert order.startswith("H")
    assert len(order) > 1
    assert faults(store) == {}
