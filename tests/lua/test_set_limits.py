"""Limits whose numbers are set at run time apply to all consumers and to waiting messages."""

from __future__ import annotations

import pytest

from kombu_delayed.message.ticket import Gate, LimitNumbers, Ticket, Use, put_ticket
from kombu_delayed.store.policies.overrides import Override
from kombu_delayed.store.store import Entry, Store
from tests.kit.claims import bodies, deliver, free
from tests.kit.state import message

SLOTS = Gate("v", (LimitNumbers("all", 2), LimitNumbers("other", 1)))
RATE = Gate("v", (LimitNumbers("all", 0, 100_000.0, 1),))


@pytest.fixture
def waiting(store: Store) -> Store:
    """Eight messages that use the limit, each in a separate lane."""
    for id in "abcdefgh":
        ticket = Ticket(id, uses=(Use("all"),)).text("v", id)
        store.publish("q", [Entry(id, 0, put_ticket(message(id), ticket), "")])
    return store


def taken(store: Store, gate: Gate, tag: int) -> int:
    return len(bodies(deliver(store, "A", 9, tag, gate=gate)))


def has_token(store: Store) -> bool:
    return store.run("ZSCORE", store.keys("q").wake, "now") is not None


def test_concurrency(waiting: Store) -> None:
    assert taken(waiting, SLOTS, 1) == 2
    waiting.overrides.set("q", "all", Override(5, None, None, by="ann", why="more"), 60_000)
    assert has_token(waiting)
    assert taken(waiting, SLOTS, 11) == 3
    assert waiting.overrides.of("q")["all"] == (5, None, None, "", 61_000, 0, "ann", "more")
    waiting.overrides.set("q", "all", Override(1, None, None))
    free(waiting, 1, 2, 11, 12)
    assert taken(waiting, SLOTS, 21) == 0  # one runs
    assert waiting.overrides.reset("q", "all")
    assert taken(waiting, SLOTS, 31) == 1
    assert not waiting.overrides.reset("q", "all")
    assert waiting.overrides.of("q") == {}


def test_it_ends_by_itself(waiting: Store) -> None:
    waiting.overrides.set("q", "all", Override(1, None, None), 5_000)
    assert taken(waiting, SLOTS, 1) == 1
    assert deliver(waiting, "A", 9, 11, gate=SLOTS).next_due_ms == 6_000
    waiting.now = "5999"
    assert taken(waiting, SLOTS, 11) == 0
    waiting.now = "6000"
    assert taken(waiting, SLOTS, 21) == 1
    assert waiting.overrides.of("q") == {}


@pytest.mark.parametrize(
    ("override", "then", "later"),
    [
        (Override(None, 1_000.0, None), 0, 1),
        (Override(None, 1_000.0, 4), 0, 1),  # all tokens are spent at first
        (Override(None, None, 3), 2, 0),
        (Override(7, None, None), 0, 0),  # nothing limits how many run at once
    ],
)
def test_rate(override: Override, then: int, later: int, waiting: Store) -> None:
    assert taken(waiting, RATE, 1) == 1
    waiting.overrides.set("q", "all", override)
    assert taken(waiting, RATE, 11) == then
    waiting.now = "2000"
    assert taken(waiting, RATE, 21) == later


def test_damaged(waiting: Store) -> None:
    """Invalid values written by hand change nothing."""
    waiting.run("HSET", waiting.keys("q").overrides, "all", "many", "none", "1 2")
    assert taken(waiting, SLOTS, 1) == 2
    assert waiting.overrides.of("q") == {}
