"""How a consumer handles slots of global limits when calls get lost or its loop is stuck."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from kombu_delayed.consumer.policy import shared_slots
from kombu_delayed.inspection.gate_usage import slots_in_use
from kombu_delayed.message.ticket import Gate, LimitNumbers, Ticket, Use, put_ticket
from kombu_delayed.store.global_limits import GlobalLimits, pool_of, shared
from kombu_delayed.store.store import Entry, Store
from tests.kit.sharing import LEASE_MS, Lossy, SharingConsumer
from tests.kit.state import message

GATE = Gate("v", (LimitNumbers("all", 3, is_global=True),))
POOL = pool_of("all")


class Bench:
    """A consumer, its clock, and a queue with messages that wait for slots."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch, messages: int) -> None:
        self.now = 1_000.0
        monkeypatch.setattr(shared_slots, "monotonic", lambda: self.now)
        self.lossy = Lossy(store)
        self.one = self.new("A")
        for n in range(messages):
            text = put_ticket(message(f"m{n}"), Ticket(uses=(Use("all"),)).text("v", f"m{n}"))
            store.publish("q", [Entry(f"m{n}", 0, text, "")])

    def new(self, name: str) -> SharingConsumer:
        return SharingConsumer(self.lossy, name, lambda: self.now)

    def share(self, consumer: SharingConsumer, room: int, loses: str = "") -> None:
        self.lossy.loses = loses
        consumer.shared.step(consumer, room, lambda queue: queue == "q")
        self.lossy.loses = ""

    def in_use(self) -> int:
        return slots_in_use(self.lossy.store, POOL).get("all:", 0)


@pytest.fixture
def bench(store: Store, monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda messages: Bench(store, monkeypatch, messages)


@pytest.mark.parametrize("loses", ["answer", "call"])
def test_what_was_lost_is_said_again_though_nothing_is_claimed(bench: Any, loses: str) -> None:
    """Otherwise no other consumer could use these slots while this one lives."""
    b = bench(2)
    b.one.claim("q", GATE, 5)
    b.share(b.one, 5, loses)
    assert b.in_use() == (2 if loses == "answer" else 0)
    other = b.new("B")
    other.claim("q", GATE, 5)
    b.now += 10
    assert b.one.shared.next_at(b.one, 0) <= b.now
    b.share(b.one, 0)
    b.share(other, 5)
    assert len(other.claim("q", GATE, 5)) == 2


def test_slots_that_had_to_be_given_back_are_when_their_server_is_back(bench: Any) -> None:
    b = bench(1)
    b.one.claim("q", GATE, 5)
    b.share(b.one, 5)
    ((tag, _),) = b.one.claim("q", GATE, 5)
    b.one.shared.ended(tag)
    b.now += 1
    b.share(b.one, 0, "call")
    b.now += 10
    b.share(b.one, 0)
    assert b.in_use() == 0


def begin_and_get_stuck(b: Any) -> list[int]:
    """Claim three messages, after which the consumer's loop counts as stuck; returns their tags."""
    b.one.claim("q", GATE, 5)
    b.share(b.one, 5)
    found = b.one.claim("q", GATE, 5)
    assert len(found) == b.in_use() == 3
    return [tag for tag, _ in found]


def tell(b: Any) -> None:
    b.one.shared.report_taken_back(b.lossy.store, "A", LEASE_MS)


def test_others_get_what_a_stuck_loop_has_not_begun(bench: Any) -> None:
    b = bench(3)
    runs, *waiting = begin_and_get_stuck(b)
    for tag in waiting:
        b.one.shared.take_over(tag)
    tell(b)
    assert b.in_use() == 1
    b.one.shared.ended(runs)
    b.now += 1
    b.share(b.one, 0)
    assert b.in_use() == 0


def test_a_loop_that_goes_on_knows_better(bench: Any) -> None:
    """Its call overtakes that of the thread that found it stuck, which then changes nothing."""
    b = bench(4)
    runs, waits, _ = begin_and_get_stuck(b)
    b.one.shared.take_over(waits)
    store, pool = b.lossy.store, b.one.shared.pools["all"]
    known = pool.known
    b.one.shared.ended(runs)
    b.now += 1
    b.one.claim("q", GATE, 0)
    b.share(b.one, 5)
    assert b.in_use() == 2  # one runs, and one is for the message that has waited
    number, held = known
    move, given = GlobalLimits(store).share_call(
        POOL, "A", number + 1, pool.numbers, held, {}, most=0, lease_ms=LEASE_MS, leased=True
    )
    move(store.run, **given)
    assert b.in_use() == 2
    tell(b)  # it has nothing left to report
    assert b.in_use() == 2


def test_a_claim_that_has_all_it_wanted_tells_what_the_rest_lacks(bench: Any) -> None:
    """So the next claim is made with slots, and no claim is in vain."""
    b = bench(3)
    b.one.claim("q", GATE, 0)
    b.share(b.one, 1)
    store = b.lossy.store
    taken = b.one.shared.take("q", GATE, 1)
    answer = store.deliver("q", "A", 1, 1, lease_ms=LEASE_MS, gate=GATE, taken=taken)
    assert (len(answer.records), answer.more) == (1, False)
    assert [(each.slot, each.cost, each.messages) for each in answer.lacking] == [("all:", 1, 2)]
    assert store.run("ZSCORE", "{q}:wake", "now") is not None  # others may have room for these


def test_nothing_stays_when_the_last_one_is_handed_out(bench: Any, client: redis.Redis) -> None:
    b = bench(2)
    b.one.claim("q", GATE, 0)
    for _ in range(2):
        b.share(b.one, 1)
        ((tag, _),) = b.one.claim("q", GATE, 1)
        b.lossy.store.ack("q", "A", [tag], lambda: None)
        b.one.shared.ended(tag)
    b.lossy.store.run.settle()
    keys: Any = client.keys("{q}:*")
    assert sorted(keys) == [b"{q}:consumers"]


def test_messages_that_need_no_slot_pass_those_that_do(bench: Any) -> None:
    b = bench(3)
    b.lossy.store.publish(
        "q", [Entry("free", 0, put_ticket(message("free"), Ticket().text("v", "free")), "")]
    )
    ((_, record),) = b.one.claim("q", GATE, 5)
    assert b"free" in record


def test_shards_use_the_slots_of_their_queue(bench: Any) -> None:
    """A slot taken for one shard and not needed there is available to another at once."""
    b = bench(2)
    store: Store = b.lossy.store
    for n in range(2):
        text = put_ticket(message(f"s{n}"), Ticket(uses=(Use("all"),)).text("v", f"s{n}"))
        store.publish("q\x1f1", [Entry(f"s{n}", 0, text, "")])
    for shard in ("q", "q\x1f1"):
        b.one.claim(shard, GATE, 0)
    b.one.shared.step(b.one, 3, lambda queue: True)
    store.purge("q")
    assert b.one.claim("q", GATE, 3) == []
    assert len(b.one.claim("q\x1f1", GATE, 3)) == 2


def test_a_signal_handler_cancels_the_queue_while_its_slots_are_taken(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench(1)
    b.one.claim("q", GATE, 5)

    def cancel(answer: Any) -> Any:
        b.one.shared.forget_queue("q")
        return shared(answer)

    monkeypatch.setattr(shared_slots, "shared", cancel)
    b.share(b.one, 5)
    assert b.in_use() == 1
    b.now += 1
    b.share(b.one, 5)
    assert b.in_use() == 0
