from __future__ import annotations

from collections.abc import Callable

import pytest
import redis

from kombu_delayed.inspection.backlog import Backlog
from kombu_delayed.inspection.doctor import examine_queues
from kombu_delayed.inspection.gate_usage import slots_in_use, waiting_count
from kombu_delayed.message.envelope import open_envelope
from kombu_delayed.message.ticket import OPEN_GATE, Gate, LimitNumbers, Ticket, Use, put_ticket
from kombu_delayed.store.claimable import Delivered
from kombu_delayed.store.policies.declared import PolicyRecord
from kombu_delayed.store.store import Entry, Store
from tests.kit.claims import ack, bodies, deliver, free
from tests.kit.state import message

GATE = Gate("v", (LimitNumbers("all", 1),))
NO_LIMITS = Gate("v")
TICKET = Ticket("k", uses=(Use("all"),))


def entry(id: str, ticket: Ticket = TICKET, due: str = "") -> Entry:
    return Entry(id, 0, put_ticket(message(id), ticket.text("v", id)), due)


def claim(store: Store, want: int = 9, gate: Gate | None = GATE, tag: int = 1) -> Delivered:
    return deliver(store, "A", want, tag, gate=gate)


def taken(store: Store, want: int = 9, gate: Gate | None = GATE, tag: int = 1) -> str:
    return "".join(bodies(claim(store, want, gate, tag)))


def faults(store: Store, *, fix: bool = False) -> dict[str, int]:
    found = examine_queues(store, ["q"], fix=fix, patience_seconds=0.01)
    return {each.kind: each.count for each in found}


@pytest.mark.parametrize("is_acked", [False, True])
def test_a_slot_that_comes_back_wakes_a_consumer(is_acked: bool, store: Store) -> None:
    store.publish("q", [entry(id) for id in "ab"])
    claim(store)
    assert store.run("ZSCORE", store.keys("q").wake, "now") is None
    if is_acked:
        ack(store, 1, freed=[1])
    else:
        free(store, 1)
    assert store.run("ZSCORE", store.keys("q").wake, "now") is not None


def test_slots_of_the_dead_come_back(store: Store) -> None:
    store.publish("q", [entry(id) for id in "ab"])
    claim(store)
    store.now = "40000"
    assert store.leases.reclaim("q", "A") == 1
    assert slots_in_use(store, "q") == {}


def test_what_costs_more_than_the_limit_has_it_alone(store: Store) -> None:
    heavy = Ticket("k", uses=(Use("all", cost=9),))
    store.publish("q", [entry("a", heavy), entry("b")])
    gate = Gate("v", (LimitNumbers("all", 2),))
    assert taken(store, gate=gate) == "a"


def test_how_long_the_first_has_waited(store: Store) -> None:
    assert store.metrics("q").oldest_waiting_seconds == 0
    store.publish("q", [entry(id) for id in "abc"])
    claim(store)
    store.now = "3500"
    found = store.metrics("q")
    assert (found.waiting, found.oldest_waiting_seconds) == (2, 2.5)


def refund(store: Store, gate: Gate, due_ms: int) -> None:
    store.ask("refund", "q", limits=gate.numbers, due_ms=due_ms, uses=["all:", 1])


def test_the_token_of_what_does_not_run_is_for_the_next_one(store: Store) -> None:
    gate = Gate("v", (LimitNumbers("all", 0, 60_000.0, 1),))
    store.publish("q", [entry(id) for id in "abc"])
    assert taken(store, gate=gate) == "a"
    store.run("ZREM", store.keys("q").wake, "now")
    refund(store, gate, 1000)
    assert store.run("ZSCORE", store.keys("q").wake, "now") is not None
    assert taken(store, gate=gate, tag=2) == "b"
    for _ in range(2):  # twice gives back two, and there never are more than these
        refund(store, gate, 1000)
    assert taken(store, gate=gate, tag=3) == "c"


def test_what_needed_no_token_gives_none_back(store: Store) -> None:
    gate = Gate("v", (LimitNumbers("all", 0, 60_000.0, 1, after_ms=500),))
    store.schedule("q", [entry(id, due="1100") for id in "ab"])
    store.now = "2000"
    assert taken(store, gate=gate) == "a"
    refund(store, gate, 1800)
    assert taken(store, gate=gate, tag=2) == ""
    refund(store, gate, 1100)
    assert taken(store, gate=gate, tag=2) == "b"


def test_a_promise_for_the_next_token(store: Store) -> None:
    gate = Gate("v", (LimitNumbers("all", 0, 250.0, 2),))
    store.publish("q", [entry(id) for id in "abcd"])
    answer = claim(store, gate=gate)
    assert ("".join(bodies(answer)), answer.next_due_ms) == ("ab", 1250)
    store.now = "1249"
    assert taken(store, gate=gate, tag=3) == ""
    store.now = "1250"
    answer = claim(store, gate=gate, tag=3)
    assert ("".join(bodies(answer)), answer.next_due_ms) == ("c", 1500)


@pytest.mark.parametrize("gate", [Gate("v", (LimitNumbers("all", 3),)), Gate("v")])
def test_a_raised_or_removed_limit_holds_with_the_next_end(gate: Gate, store: Store) -> None:
    store.publish("q", [entry(id) for id in "abcd"])
    claim(store)
    free(store, 1)
    assert taken(store, gate=gate, tag=2) == "bcd"


@pytest.mark.parametrize(("slots", "want", "found"), [(0, 3, "abc"), (0, 9, "abc"), (2, 9, "ab")])
def test_a_claim_that_leaves_nothing_to_do_says_so(
    slots: int, want: int, found: str, store: Store
) -> None:
    store.publish("q", [entry(id) for id in "abc"])
    answer = claim(store, want, Gate("v", (LimitNumbers("all", slots),)))
    assert ("".join(bodies(answer)), answer.more) == (found, False)
    assert store.run("EXISTS", store.keys("q").gate + "turns") == 0


def test_what_is_released_keeps_its_place(store: Store) -> None:
    store.publish("q", [entry(id) for id in "abcd"])
    assert taken(store, want=2, gate=NO_LIMITS) == "ab"
    store.release("q", "A", [1, 2], counted=True)
    assert taken(store, gate=NO_LIMITS, tag=3)[:2] == "ab"


def test_pages_have_what_waits_in_order_of_due_times(store: Store) -> None:
    entries = [entry(id, due=str(1001 + n % 3)) for n, id in enumerate("fbdaec")]
    entries += [entry(f"x{n}", due=str(1002 + n)) for n in range(300)]
    store.schedule("q", entries)
    store.now = "1100"
    for tag in range(1, 4):
        deliver(store, want=0, tag=tag, gate=GATE, promotions=50)
    waiting = waiting_count(store, "q")
    assert 0 < waiting < 306
    for size in (1000, 7):
        pages = list(Backlog(store, "q").pages(size=size))
        found = [(each.kept.due_ms, each.member) for page in pages for each in page]
        assert found == sorted((int(each.due), each.id) for each in entries)
    some = [each.member for page in Backlog(store, "q").pages(1002, 1004) for each in page]
    assert set(some) == {"b", "e", "d", "c", "x0", "x1"}
    assert sum(Backlog(store, "q").forecast([1002, 1003])) == len(entries)
    assert store.metrics("q").waiting == waiting
    assert store.size("q").due == store.metrics("q").due


def test_many_without_tickets_do_not_hold_up_those_who_have_turns(store: Store) -> None:
    store.publish("q", [entry(id, Ticket()) for id in "abcd"])
    assert taken(store, want=1, gate=NO_LIMITS) == "a"
    store.publish("q", [Entry(id, 0, message(id)) for id in "wxyz"])
    found = [taken(store, want=1, gate=NO_LIMITS, tag=tag) for tag in range(2, 9)]
    assert "".join(found) == "bwcxdyz"


def test_many_without_tickets_are_handed_out_while_limits_are_full(store: Store) -> None:
    store.publish("q", [entry(id) for id in "ab"])
    assert taken(store) == "a"
    store.publish("q", [Entry("z", 0, message("z")), entry("c", Ticket("k2", uses=TICKET.uses))])
    assert taken(store, want=1, tag=2) == "z"


@pytest.mark.parametrize("fair", [False, True])
def test_lanes_of_one_key_go_in_the_order_of_their_messages(store: Store, fair: bool) -> None:
    gate = Gate("v", (LimitNumbers("all", 1), LimitNumbers("customer", 5)))
    uses = {name: (Use("all"), Use("customer", name)) for name in "az"}
    key = "t" if fair else ""
    store.publish("q", [entry(str(n), Ticket(key, uses=uses["za"[n % 2]])) for n in range(8)])
    found = ""
    for tag in range(1, 9):
        found += taken(store, gate=gate, tag=tag)
        free(store, tag)
    assert found == "01234567"


def test_a_heavy_one_is_not_overtaken_for_ever(store: Store) -> None:
    gate = Gate("v", (LimitNumbers("all", 2),))
    heavy, light = Ticket(uses=(Use("all", "", 2),)), Ticket(uses=(Use("all"),))
    store.publish("q", [entry(str(n), heavy if n == 3 else light) for n in range(8)])
    running: list[int] = []
    found, tag = "", 1
    while len(found) < 8:
        answer = claim(store, gate=gate, tag=tag)
        running += range(tag, tag + len(answer.records))
        tag += len(answer.records)
        found += "".join(bodies(answer))
        free(store, running.pop(0))
    assert found == "01234567"


def test_a_blank_in_front_of_a_message_is_no_part_of_it(store: Store) -> None:
    store.publish("q", [Entry("a", 0, "  " + message("a"))])
    claim(store)
    store.admit("q", "A", [(1, TICKET.text("v", "a"), b"")], GATE)
    (record,) = claim(store, tag=2).records
    assert open_envelope(record[1:], 2).payload["body"].startswith("a")


@pytest.mark.parametrize("full", [False, True])
def test_purge_may_be_killed_half_way(store: Store, full: bool) -> None:
    gate = GATE if full else NO_LIMITS
    uses = (Use("all"),)
    for first in range(0, 600, 200):
        some = range(first, first + 200)
        store.publish("q", [entry(str(n), Ticket(f"k{n}", uses=uses)) for n in some])
        claim(store, 1, gate=gate, tag=first + 1)
    keys = store.keys("q")
    store.ask("purge", "q", limit=5_000)
    store.ask("clear", "q", limit=100)
    left = [lane.decode() for lane in store.run("HKEYS", keys.gate + "lanes")]
    assert 0 < len(left) < 597
    keys_left = [lane.split("|")[1].split("*")[0] for lane in left]
    store.publish("q", [entry(f"x{key}", Ticket(key, uses=uses)) for key in keys_left[:9]])
    found = []
    for tag in range(1000, 1100):
        free(store, *range(tag))
        found += bodies(claim(store, 1, gate=gate, tag=tag))
    assert sorted(found) == sorted(f"x{key}" for key in keys_left[:9])


def test_a_lost_lane_holds_up_no_other(store: Store, client: redis.Redis) -> None:
    store.publish("q", [entry("a", Ticket("k1")), entry("b", Ticket("k2"))])
    claim(store, 0, gate=NO_LIMITS)
    client.delete("{q}:gate:turn:k1")
    assert taken(store, gate=NO_LIMITS) == "b"


def test_what_is_in_no_lane_leaves_a_gate_that_is_not_declared(
    store: Store, client: redis.Redis
) -> None:
    store.publish("q", [entry(id) for id in "abc"])
    claim(store)
    client.delete("{q}:gate:lane:0|k*1|all:*1", "{q}:gate:blocked:all:")
    answer = claim(store, 1, OPEN_GATE, 2)
    assert ("".join(bodies(answer)), answer.more, answer.gated) == ("b", True, True)
    answer = claim(store, 9, OPEN_GATE, 3)
    assert ("".join(bodies(answer)), answer.gated) == ("c", False)
    store.clear("q")
    assert [key for key in client.keys("*gate*") if b":gate:slots" not in key] == []


@pytest.mark.parametrize("gate", [None, OPEN_GATE, GATE])
def test_nobody_gets_messages_who_goes_by_other_policies(
    gate: Gate | None, store: Store, client: redis.Redis
) -> None:
    store.publish("q", [entry(id) for id in "abc"])
    assert store.policies.read("q") == PolicyRecord()
    assert store.policies.declare("q", "{}", "w1", PolicyRecord())
    known = store.policies.read("q")
    assert (known.text, known.by, known.at_ms) == ("{}", "w1", int(store.now))
    assert not store.policies.declare("q", '{"queue":[]}', "w2", PolicyRecord())
    for version in ("", "other"):
        answer = deliver(store, "B", gate=gate, declared=version)
        found = answer.records, answer.more, answer.next_due_ms, answer.gated, answer.refused
        assert found == ([], False, 0, False, True)
    answer = deliver(store, "B", gate=gate, declared=known.version)
    assert (bool(answer.records), answer.refused) == (gate is not OPEN_GATE, False)
    assert store.policies.declare("q", '{"queue":[]}', "w2", known)
    assert deliver(store, "B", gate=gate, declared=known.version, tag=9).refused
    client.delete("{q}:policies")
    assert deliver(store, "B", gate=gate, declared=known.version, tag=9).refused
    assert not deliver(store, "B", gate=gate, tag=9).refused


@pytest.mark.parametrize("key", ["|", "a*b:c!%", '"\\', "\ud800", "ä", "\n", "x" * 300])
def test_a_key_may_be_any_text(store: Store, key: str) -> None:
    ticket = Ticket(key, uses=(Use("all", key),))
    store.publish("q", [entry(id, ticket) for id in "ab"])
    assert taken(store) == "a"
    free(store, 1)
    assert taken(store, tag=2) == "b"


def test_slots_of_running_tasks_outlast_their_consumer(store: Store) -> None:
    gate = Gate("v", (LimitNumbers("all", 3),))
    store.publish("q", [entry(id) for id in "abcd"])
    claim(store, gate=gate)
    ack(store, 1)
    store.leases.leave("q", "A", [1, 2])
    store.leases.leave("q", "A", [1, 2])
    assert slots_in_use(store, "q") == {"all:": 2}
    assert [name for name, _, _ in store.leases.consumers("q")] == ["A"]
    assert store.leases.renew("q", "A", 30_000) == []
    store.leases.leave("q", "A", [2])
    assert slots_in_use(store, "q") == {"all:": 1}
    store.leases.leave("q", "A")
    assert (slots_in_use(store, "q"), store.leases.consumers("q")) == ({}, [])
    assert store.leases.renew("q", "A", 30_000) is None


def test_doctor_counts_slots_anew(store: Store, client: redis.Redis) -> None:
    store.publish("q", [entry(id) for id in "ab"])
    claim(store)
    assert faults(store) == {}
    client.hincrby("{q}:gate:slots", "all:", 5)
    client.hset("{q}:gate:slots", "lost:", 1)
    client.hset("{q}:gate:slots:dead", "1", "|all:*1")
    assert faults(store) == {"slots": 3}
    assert faults(store, fix=True)["slots"] == 3
    assert slots_in_use(store, "q") == {"all:": 1}
    assert faults(store) == {}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda client: client.delete("{q}:gate:lanes"),
        lambda client: client.delete("{q}:gate:lane:0|k*1|all:*1"),
        lambda client: client.delete("{q}:gate:blocked:all:"),
        lambda client: client.delete("{q}:gate:blocked:all:|k"),
    ],
)
def test_doctor_puts_in_line_what_is_in_none(
    store: Store, client: redis.Redis, spoil: Callable[[redis.Redis], object]
) -> None:
    store.publish("q", [entry(id) for id in "abc"])
    claim(store)
    spoil(client)
    assert faults(store) == {"stuck": 2}
    assert faults(store, fix=True)["stuck"] >= 1  # this may correct others in the same line
    assert faults(store) == {}
    free(store, 1)
    assert taken(store, gate=NO_LIMITS, tag=2) == "bc"


def test_doctor_forgets_what_is_gone(store: Store, client: redis.Redis) -> None:
    store.publish("q", [entry(id) for id in "ab"])
    claim(store)
    client.hdel("{q}:messages", "b")
    assert faults(store, fix=True)["gone"] == 1
    assert waiting_count(store, "q") == 0


def test_what_is_due_last_does_not_wait_for_all_that_was_due_before(store: Store) -> None:
    flood = [entry(f"{n}", Ticket("flood"), due="2000") for n in range(500)]
    store.schedule("q", [*flood, entry("x", Ticket("other"), due="2001")])
    store.now = "2001"
    assert "x" in bodies(deliver(store, want=2, gate=NO_LIMITS, promotions=20))


def test_who_comes_late_makes_up_for_nothing(store: Store) -> None:
    store.publish("q", [entry(id, Ticket("a")) for id in "123456789"])
    assert taken(store, want=5, gate=NO_LIMITS) == "12345"
    store.publish("q", [entry(id, Ticket("b")) for id in "stuvwxyz"])
    assert taken(store, want=6, gate=NO_LIMITS, tag=6) in {"s6t7u8", "s6tu7v", "6st7u8"}


def test_a_slot_that_is_given_back_twice_at_once_comes_back_once(store: Store) -> None:
    store.publish("q", [entry(id) for id in "ab"])
    claim(store, gate=Gate("v", (LimitNumbers("all", 2),)))
    free(store, 1, 1)
    assert slots_in_use(store, "q") == {"all:": 1}


# The server's clock is set.

HOUR_MS = 3_600_000


def in_one_burst(store: Store, gate: Gate, at_ms: int, tag: int, want: int = 9) -> int:
    store.now = str(at_ms)
    answer = claim(store, want, gate, tag)
    if answer.records:
        free(store, *range(tag, tag + 9))
    return len(answer.records)


@pytest.mark.parametrize(("every_ms", "burst"), [(1000.0, 1), (100.0, 5), (90_000.0, 2)])
def test_a_step_back_stops_a_rate_for_its_own_interval(
    every_ms: float, burst: int, store: Store
) -> None:
    gate = Gate("v", (LimitNumbers("all", 0, every_ms, burst),))
    store.publish("q", [entry(f"{n}") for n in range(40)])
    assert in_one_burst(store, gate, HOUR_MS + 1000, 1) == burst
    assert in_one_burst(store, gate, HOUR_MS + 1001, 20) == 0
    assert in_one_burst(store, gate, 1000, 20) == 0
    for n in range(1, 4):
        assert in_one_burst(store, gate, 1000 + int(every_ms) * n, 20 * n) == 1


def test_a_step_back_stops_no_limit_beside_a_slower_one(store: Store) -> None:
    gate = Gate("v", (LimitNumbers("fast", 0, 100.0), LimitNumbers("slow", 0, 2.0 * HOUR_MS)))
    tickets = [
        Ticket("k", uses=(Use(name, str(n)),)) for n in range(15) for name in ("fast", "slow")
    ]
    for ticket in tickets:
        store.publish("q", [entry(ticket.text("v", f"{n}")[:9], ticket) for n in range(2)])
    assert in_one_burst(store, gate, HOUR_MS + 1000, 1, 99) == 30
    assert in_one_burst(store, gate, HOUR_MS + 1001, 200, 99) == 0
    found = sum(in_one_burst(store, gate, 1000 + 100 * n, 200 + 50 * n) for n in range(9))
    assert found == 15


def test_a_step_forward_gives_no_more_than_a_burst(store: Store) -> None:
    gate = Gate("v", (LimitNumbers("all", 0, 1000.0, 3),))
    store.publish("q", [entry(f"{n}") for n in range(40)])
    assert in_one_burst(store, gate, 1000, 1) == 3
    assert in_one_burst(store, gate, HOUR_MS, 20) == 3
    assert in_one_burst(store, gate, HOUR_MS + 1000, 40) == 1


@pytest.mark.parametrize("last", [NO_LIMITS, OPEN_GATE], ids=["in turn", "let out"])
def test_the_bytes_that_leave_a_gate_together_are_bounded(store: Store, last: Gate) -> None:
    ids = [f"{number:02}" for number in range(40)]
    ticket = Ticket().text("v", "k")
    large = [Entry(id, 0, put_ticket(message(id, more="x" * 200_000), ticket)) for id in ids]
    for n in range(0, 40, 4):  # all wait
        store.publish("q", large[n : n + 4])
        claim(store, 0, NO_LIMITS)
    assert waiting_count(store, "q") == len(ids)
    found: list[str] = []
    while len(found) < len(ids):
        answer = claim(store, 100, last, len(found) + 1)
        assert 0 < len(answer.records) <= 10
        found += bodies(answer)
    assert sorted(found) == ids


def test_large_ones_without_tickets_do_not_hold_up_those_who_have_turns(store: Store) -> None:
    store.publish("q", [entry(id) for id in "ab"])
    claim(store, want=0, gate=NO_LIMITS)
    store.publish("q", [Entry(f"{n}", 0, message(f"{n}", more="x" * 200_000)) for n in range(20)])
    assert taken(store, want=20, gate=NO_LIMITS)[-2:] == "ab"


def test_a_small_answer_still_brings_the_others_to_the_gate(
    store: Store, client: redis.Redis
) -> None:
    """Otherwise a tenant would wait behind the flood of another for longer."""
    store.publish("q", [entry(f"{n}") for n in range(50)])
    answer = deliver(store, want=1, gate=GATE, most_bytes=1)
    assert len(answer.records) == 1
    assert client.llen("q") == 0
