from __future__ import annotations

import pytest
import redis

from kombu_delayed.backlog import Backlog
from kombu_delayed.doctor import Doctor
from kombu_delayed.gate import Gate, LimitNumbers, Ticket, Use, put_ticket
from kombu_delayed.store import Delivered, Entry, Store
from tests.kit.state import message

GATE = Gate("v", (LimitNumbers("all", 1),))
TICKET = Ticket("k", uses=(Use("all"),))


@pytest.fixture(autouse=True)
def _time_stands_still(store: Store) -> None:
    store.now = "1000"


def entry(id: str, ticket: Ticket = TICKET, due: str = "") -> Entry:
    return Entry(id, 0, put_ticket(message(id), ticket.text("v", id)), due)


def deliver(store: Store, want: int = 9, gate: Gate | None = GATE, tag: int = 1) -> Delivered:
    answer = store.deliver("q", "A", want, tag, lease_ms=30_000, gate=gate)
    assert answer is not None
    return answer


def bodies(answer: Delivered) -> str:
    return "".join(record.decode().split('"body":"')[1][0] for record in answer.records)


def faults(store: Store, *, fix: bool = False) -> dict[str, int]:
    found = Doctor(store, "q", fix=fix, patience_seconds=0.01).examine()
    return {each.kind: each.count for each in found}


def test_one_slot_after_the_other(store: Store) -> None:
    store.publish("q", [entry(id) for id in "abc"])
    assert bodies(deliver(store)) == "a"
    assert bodies(deliver(store, tag=2)) == ""
    store.free("q", "A", [1], on_error=lambda: pytest.fail("refused"))
    assert bodies(deliver(store, tag=2)) == "b"
    assert store.waiting("q") == 1
    assert store.running("q") == {"all:": 1}


def test_how_long_the_first_has_waited(store: Store) -> None:
    assert store.metrics("q").oldest_waiting_seconds == 0
    store.publish("q", [entry(id) for id in "abc"])
    deliver(store)
    store.now = "3500"
    found = store.metrics("q")
    assert (found.waiting, found.oldest_waiting_seconds) == (2, 2.5)


def test_a_promise_for_the_next_token(store: Store) -> None:
    gate = Gate("v", (LimitNumbers("all", 0, 250.0, 2),))
    store.publish("q", [entry(id) for id in "abcd"])
    answer = deliver(store, gate=gate)
    assert (bodies(answer), answer.next_due_ms) == ("ab", 1250)
    store.now = "1249"
    assert bodies(deliver(store, gate=gate, tag=3)) == ""
    store.now = "1250"
    answer = deliver(store, gate=gate, tag=3)
    assert (bodies(answer), answer.next_due_ms) == ("c", 1500)


def test_a_raised_limit_holds_with_the_next_end(store: Store) -> None:
    store.publish("q", [entry(id) for id in "abcd"])
    deliver(store)
    more = Gate("v", (LimitNumbers("all", 3),))
    store.free("q", "A", [1], on_error=lambda: pytest.fail("refused"))
    assert bodies(deliver(store, gate=more, tag=2)) == "bcd"


def test_a_removed_limit_holds_no_more(store: Store) -> None:
    store.publish("q", [entry(id) for id in "abcd"])
    deliver(store)
    store.free("q", "A", [1], on_error=lambda: pytest.fail("refused"))
    assert bodies(deliver(store, gate=Gate("v"), tag=2)) == "bcd"


def test_a_message_with_another_ticket_goes_to_its_consumer(store: Store) -> None:
    store.publish("q", [entry("a")])
    other = Gate("w", GATE.limits)
    answer = deliver(store, gate=other)
    assert bodies(answer) == "a"
    assert not other.has_ticket(answer.records[0])
    assert store.running("q") == {}
    assert store.admit("q", "A", [(1, TICKET.text("w", "a"), b"")]) == 1
    assert store.admit("q", "A", [(1, TICKET.text("w", "a"), b"")]) == 0
    again = deliver(store, gate=other, tag=2)
    assert bodies(again) == "a"
    assert other.has_ticket(again.records[0])


def test_what_is_released_keeps_its_place(store: Store) -> None:
    free = Gate("v")
    store.publish("q", [entry(id) for id in "abcd"])
    assert bodies(deliver(store, want=2, gate=free)) == "ab"
    store.release("q", "A", [1, 2], counted=True)
    assert bodies(deliver(store, gate=free, tag=3))[:2] == "ab"


def test_pages_have_what_waits_in_order_of_due_times(store: Store) -> None:
    entries = [entry(id, due=str(1001 + n % 3)) for n, id in enumerate("fbdaec")]
    entries += [entry(f"x{n}", due=str(1002 + n)) for n in range(300)]
    store.schedule("q", entries)
    store.now = "1100"
    for tag in range(1, 4):
        store.deliver("q", "A", 0, tag, lease_ms=30_000, gate=GATE, promotions=50)
    waiting = store.waiting("q")
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


def test_purge_leaves_nothing(store: Store, client: redis.Redis) -> None:
    store.publish("q", [entry(f"{n}", Ticket(f"k{n}", uses=(Use("all"),))) for n in range(600)])
    for tag in range(1, 5):
        deliver(store, tag=tag * 10)
    store.leave("q", "A")
    assert store.waiting("q") > 300
    assert store.purge("q") == 600
    store.delete("q")
    assert [key for key in client.keys("*") if b":gate:rate" not in key] == []


# The doctor.


def test_doctor_finds_nothing_in_a_gate_in_use(store: Store) -> None:
    store.publish("q", [entry(id) for id in "abc"])
    deliver(store)
    assert faults(store) == {}


def test_doctor_counts_slots_anew(store: Store, client: redis.Redis) -> None:
    store.publish("q", [entry(id) for id in "ab"])
    deliver(store)
    client.hincrby("{q}:gate:slots", "all:", 5)
    client.hset("{q}:gate:slots", "lost:", 1)
    client.hset("{q}:gate:slots:dead", "1", "|all:*1")
    assert faults(store) == {"slots": 3}
    assert faults(store, fix=True)["slots"] == 3
    assert store.running("q") == {"all:": 1}
    assert faults(store) == {}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda client: client.delete("{q}:gate:lanes"),
        lambda client: client.delete("{q}:gate:lane:0|k*1|all:*1"),
        lambda client: client.delete("{q}:gate:blocked:all:"),
    ],
)
def test_doctor_puts_in_line_what_is_in_none(
    store: Store, client: redis.Redis, spoil: object
) -> None:
    store.publish("q", [entry(id) for id in "abc"])
    deliver(store)
    spoil(client)  # type: ignore[operator]
    assert faults(store) == {"stuck": 2}
    assert faults(store, fix=True)["stuck"] >= 1  # what is in the same line is right then
    assert faults(store) == {}
    store.free("q", "A", [1], on_error=lambda: pytest.fail("refused"))
    assert bodies(deliver(store, gate=Gate("v"), tag=2)) == "bc"


def test_doctor_forgets_what_is_gone(store: Store, client: redis.Redis) -> None:
    store.publish("q", [entry(id) for id in "ab"])
    deliver(store)
    client.hdel("{q}:messages", "b")
    assert faults(store, fix=True)["gone"] == 1
    assert store.waiting("q") == 0


def test_what_is_due_last_does_not_wait_for_all_that_was_due_before(store: Store) -> None:
    free = Gate("v")
    flood = [entry(f"{n}", Ticket("flood"), due="2000") for n in range(500)]
    store.schedule("q", [*flood, entry("x", Ticket("other"), due="2001")])
    store.now = "2001"
    answer = store.deliver("q", "A", 2, 1, lease_ms=30_000, gate=free, promotions=20)
    assert answer is not None
    assert "x" in bodies(answer)


def test_who_comes_late_makes_up_for_nothing(store: Store) -> None:
    free = Gate("v")
    store.publish("q", [entry(f"a{n}", Ticket("a")) for n in range(9)])
    assert bodies(deliver(store, want=5, gate=free)) == "aaaaa"
    store.publish("q", [entry(f"b{n}", Ticket("b")) for n in range(9)])
    assert bodies(deliver(store, want=6, gate=free, tag=6)) in {"bababa", "babbab", "abbaba"}


def test_a_burst_is_no_larger_than_allowed(store: Store) -> None:
    store.publish("q", [entry(id) for id in "abcde"])
    assert bodies(deliver(store, gate=Gate("v", (LimitNumbers("all", 0, 40.0, 3),)))) == "abc"
