"""Reading which messages wait at a gate and how many slots are in use."""

from __future__ import annotations

import pytest
import redis

from kombu_delayed.inspection.gate_usage import Lane, known_as, lanes, of_key, of_slot
from kombu_delayed.message.ticket import Gate, LimitNumbers, Ticket, Use, put_ticket, slot_name
from kombu_delayed.store.store import Entry, Store
from tests.kit.claims import deliver
from tests.kit.state import message

GATE = Gate("v", (LimitNumbers("all", 2), LimitNumbers("by", 1, 250.0, 3)))
LONG = "x" * 150
KEYS = ["ada", "a:b|c*d%", "ü\udcff", LONG]


def entry(id: str, key: str, *uses: Use) -> Entry:
    return Entry(id, 0, put_ticket(message(id), Ticket(key, uses=uses).text("v", id)))


def claim(store: Store, tag: int = 1) -> int:
    return len(deliver(store, tag=tag, gate=GATE).records)


def found(store: Store, pattern: str = "") -> list[Lane]:
    return [lane for page in lanes(store, "q", pattern) for lane in page]


@pytest.mark.parametrize("key", KEYS)
def test_lanes_of_a_key(store: Store, key: str) -> None:
    store.publish("q", [entry("first", "first", Use("all", cost=9))])
    assert claim(store) == 1
    for n, each in enumerate(KEYS):
        store.publish("q", [entry(f"t{n}", each, Use("all", cost=9))])
        store.publish("q", [entry(f"l{n}", "other", Use("by", each), Use("all", cost=9))])
    assert claim(store, tag=2) == 0
    names = {lane.name for lane in found(store)}
    mine = found(store, of_key(key))
    assert {lane.name for lane in mine} < names, "others are left out"
    by_turn = [lane for lane in mine if lane.turn[0] == known_as(key)]
    by_limit = [lane for lane in mine if Use("by", known_as(key)) in lane.uses]
    assert (len(by_turn), len(by_limit), len(mine)) == (1, 1, 2)
    assert found(store, of_slot(slot_name("by", key))) == by_limit


def test_what_is_no_lane_is_left_out(store: Store, client: redis.Redis) -> None:
    client.hset("{q}:gate:lanes", mapping={"what": "", b"\xff": "", "0|k*1": "", "0|none*1": ""})
    for name in (b"what", b"\xff", b"0|k*1"):
        client.zadd(b"{q}:gate:lane:" + name, {"a": 1.5})
    assert [lane.name for lane in found(store)] == ["0|k*1"]
