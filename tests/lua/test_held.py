"""What happens to messages that a consumer holds."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import redis

from kombu_delayed.consumer.lease.keeper import Keeper
from kombu_delayed.consumer.lease.lease import Lease
from kombu_delayed.message.ticket import Gate
from kombu_delayed.store.keys import SEPARATOR
from kombu_delayed.store.renewal import Renewal
from kombu_delayed.store.store import CALL_LIMIT, Limits, Store
from tests.kit.state import entry, message, returned, seed, state

A, B, C, D = (message(body) for body in "abcd")
MID = "q" + SEPARATOR + "3"
HELD = {"1": "0" + A, "2": "3" + B, "3": "0" + C}


@pytest.fixture(autouse=True)
def _time_stands_still(store: Store) -> None:
    store.now = "1000"


def call(store: Store, name: str, consumer: str, limit: int = 250) -> Any:
    """Run leave or reclaim once, where the store goes on until nothing is left."""
    more = {"running": []} if name == "leave" else {"ended_ms": ""}
    return store.ask(name, "q", consumer, limit=limit, **more)


# ack


def ack(store: Store, consumer: str, tags: list[int]) -> None:
    store.ack("q", consumer, tags, on_error=lambda: pytest.fail("an ack was refused"))
    store.size("q")  # an ack does not wait; what comes after it does


@pytest.mark.parametrize("event_limit", [0, 100])
@pytest.mark.parametrize(
    ("tags", "left"), [([1, 3], ["2"]), ([3, 99], ["1", "2"]), ([1, 2, 3], [])]
)
def test_ack(
    tags: list[int], left: list[str], event_limit: int, store: Store, client: redis.Redis
) -> None:
    store.event_limit = event_limit
    seed(client, {"{q}:unacked:A": HELD, "{r}:unacked:A": HELD})
    ack(store, "A", tags)
    assert state(client).get("{q}:unacked:A", {}) == {tag: HELD[tag] for tag in left}
    assert state(client)["{r}:unacked:A"] == HELD


def test_ack_of_another_s_message(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:unacked:A": HELD})
    ack(store, "B", [1])
    assert state(client) == {"{q}:unacked:A": HELD}


def test_ack_of_any_number(store: Store, client: redis.Redis) -> None:
    client.hset("{q}:unacked:A", mapping={str(tag): "0x" for tag in range(10_000)})
    ack(store, "A", list(range(10_000)))
    assert state(client) == {}


def test_refused_ack_is_reported(store: Store, client: redis.Redis) -> None:
    client.set("{q}:unacked:A", "not a hash")
    refused: list[int] = []
    store.ack("q", "A", [1], on_error=lambda: refused.append(1))
    store.size("q")
    assert refused == [1]


# release


def test_release_to_the_heads_in_order(store: Store, client: redis.Redis) -> None:
    seed(client, {"q": [D], "{q}:unacked:A": HELD})
    assert store.release("q", "A", [1, 2, 3]) == 3
    assert state(client) == {
        "q": [returned(A, 0), returned(C, 0), D],
        MID: [returned(B, 0)],
        "{q}:wake": {"now": 0},
    }


def test_release_behind_what_waits_in_the_order_given(store: Store, client: redis.Redis) -> None:
    seed(client, {"q": [D], "{q}:unacked:A": HELD})
    assert store.release("q", "A", [3, 2, 1], counted=True, behind=True) == 3
    assert state(client)["q"] == [D, returned(C, 1), returned(A, 1)]


@pytest.mark.parametrize("tags", [[3, 1], [1, 3], [1, 3, 1, 3]])
def test_order_of_the_tags_does_not_matter(
    tags: list[int], store: Store, client: redis.Redis
) -> None:
    seed(client, {"{q}:unacked:A": HELD})
    assert store.release("q", "A", tags) == 2
    assert state(client)["q"] == [returned(A, 0), returned(C, 0)]
    assert state(client)["{q}:unacked:A"] == {"2": "3" + B}


def test_tags_are_numbers(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:unacked:A": {"9": "0" + A, "10": "0" + B, "100": "0" + C}})
    store.release("q", "A", [10, 100, 9])
    assert state(client)["q"] == [returned(A, 0), returned(B, 0), returned(C, 0)]


def test_release_counts_attempts(store: Store, client: redis.Redis) -> None:
    seed(client, {"q": [A]})
    texts = []
    for counted in (True, False, True):
        store.deliver("q", "A", 1, 1, lease_ms=30_000)
        store.release("q", "A", [1], counted=counted)
        texts.append(state(client)["q"])
    assert texts == [[returned(A, 1)], [returned(A, 1)], [returned(A, 2)]]


def test_script_sorts_the_tags_itself(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:unacked:A": HELD})
    store.ask("release", "q", "A", counted=0, behind=0, tags=[1, 3])
    assert state(client)["q"] == [returned(A, 0), returned(C, 0)]


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ('{"deliveries":4}', '{"deliveries":4,"deliveries":1}'),
        ('{"a":1,"deliveries":9}', '{"a":1,"deliveries":10}'),
        ('{"a": 1, "deliveries": 9}', '{"a": 1,"deliveries":10}'),
        ('{"a":{"b":1,"deliveries":4}}', '{"a":{"b":1,"deliveries":4},"deliveries":1}'),
        ('{"body":",\\"deliveries\\":4}"}', '{"body":",\\"deliveries\\":4}","deliveries":1}'),
        pytest.param(f'{{"a":1,"deliveries":{"0" * 99}4}}', '{"a":1,"deliveries":5}', id="digits"),
        ('{"a":1} \n', '{"a":1,"deliveries":1}'),
        ("not an object", "not an object"),
        ("{} is followed by something", "{} is followed by something"),
        ("", ""),
        (" ", " "),
    ],
)
def test_count_goes_to_the_end_of_the_envelope(
    text: str, after: str, store: Store, client: redis.Redis
) -> None:
    seed(client, {"{q}:unacked:A": {"1": "0" + text}})
    store.release("q", "A", [1], counted=True)
    assert state(client)["q"] == [after]


@pytest.mark.parametrize("tags", [[], [4], [7, 8, 9]])
def test_release_of_what_is_not_held(tags: list[int], store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:unacked:A": HELD})
    assert store.release("q", "A", tags) == 0
    assert state(client) == {"{q}:unacked:A": HELD}


def test_release_twice(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:unacked:A": HELD})
    assert [store.release("q", "A", [1]) for _ in range(2)] == [1, 0]
    assert state(client)["q"] == [returned(A, 0)]


def test_release_of_any_number(store: Store, client: redis.Redis) -> None:
    client.hset("{q}:unacked:A", mapping={str(tag): f"0{tag}" for tag in range(10_000)})
    assert store.release("q", "A", range(10_000)) == 10_000
    assert state(client)["q"] == [str(tag) for tag in range(10_000)]


# leave


def test_leave(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("d", 2000)])
    backlog = state(client)
    seed(
        client,
        {
            "{q}:unacked:A": HELD,
            "{q}:consumers": {"A": 9000, "B": 9000},
            "{q}:armed": "2000 A",
        },
    )
    client.delete("{q}:wake")
    store.leases.leave("q", "A")
    assert state(client) == {
        **backlog,
        "q": [returned(A, 0), returned(C, 0)],
        MID: [returned(B, 0)],
        "{q}:consumers": {"B": 9000},
        "{q}:wake": {"now": 0, "due": 2000},
    }


def test_leave_passes_on_what_it_was_told(store: Store, client: redis.Redis) -> None:
    seed(client, {"q": [A], "{q}:consumers": {"A": 9000}})
    store.leases.leave("q", "A")
    assert state(client) == {"q": [A], "{q}:wake": {"now": 0}}


def test_leave_keeps_another_s_promise(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:armed": "2000 B"})
    store.leases.leave("q", "A")
    assert state(client) == {"{q}:armed": "2000 B"}


def test_leave_twice(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:unacked:A": HELD, "{q}:consumers": {"A": 9000}})
    store.leases.leave("q", "A")
    before = state(client)
    store.leases.leave("q", "A")
    assert state(client) == before


def test_leave_is_bounded(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:unacked:A": {str(n): f"0{n}" for n in range(25)}, "{q}:consumers": {"A": 9}})
    left = [call(store, "leave", "A", 10) for _ in range(3)]
    assert left == [15, 5, 0]
    assert state(client) == {"q": [str(n) for n in range(25)], "{q}:wake": {"now": 0}}


def test_leave_with_much(store: Store, client: redis.Redis) -> None:
    client.hset("{q}:unacked:A", mapping={str(tag): f"0{tag}" for tag in range(2000)})
    store.leases.leave("q", "A")
    assert state(client)["q"] == [str(tag) for tag in range(2000)]


# reclaim


@pytest.mark.parametrize(
    "lease", [{}, {"{q}:consumers": {"A": 1000}}, {"{q}:consumers": {"A": 999}}]
)
def test_reclaim(lease: dict[str, Any], store: Store, client: redis.Redis) -> None:
    seed(client, {"q": [D], "{q}:unacked:A": HELD, **lease})
    assert store.leases.reclaim("q", "A") == 3
    assert state(client) == {
        "q": [returned(A, 1), returned(C, 1), D],
        MID: [returned(B, 1)],
        "{q}:wake": {"now": 0},
    }


def test_lease_that_lasts_is_left_alone(store: Store, client: redis.Redis) -> None:
    before = {"{q}:unacked:A": HELD, "{q}:consumers": {"A": 1001}, "{q}:armed": "2000 A"}
    seed(client, before)
    assert store.leases.reclaim("q", "A") == 0
    assert state(client) == before


def test_reclaim_is_bounded(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:unacked:A": {str(n): f"0{n}" for n in range(25)}, "{q}:consumers": {"A": 9}})
    assert call(store, "reclaim", "A", 10) == [10, 15]
    assert state(client)["{q}:consumers"] == {"A": 0}
    assert call(store, "reclaim", "A", 10) == [10, 5]
    assert call(store, "reclaim", "A", 10) == [5, 0]
    assert state(client) == {"q": [str(n) for n in range(25)], "{q}:wake": {"now": 0}}
    assert call(store, "reclaim", "A", 10) == [0, 0]


def test_reclaim_with_much(store: Store, client: redis.Redis) -> None:
    client.hset("{q}:unacked:A", mapping={str(tag): f"0{tag}" for tag in range(2000)})
    assert store.leases.reclaim("q", "A") == 2000
    assert state(client)["q"] == [str(tag) for tag in range(2000)]


def test_reclaim_hands_the_promise_back(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("d", 2000)])
    seed(client, {"{q}:armed": "2000 A", "{q}:consumers": {"A": 500}})
    client.delete("{q}:wake")
    assert store.leases.reclaim("q", "A") == 0
    after = state(client)
    assert after["{q}:wake"] == {"due": 2000}
    assert "{q}:armed" not in after
    assert "{q}:consumers" not in after


def test_reclaim_keeps_another_s_promise(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:armed": "2000 B", "{q}:consumers": {"A": 500}})
    store.leases.reclaim("q", "A")
    assert state(client) == {"{q}:armed": "2000 B"}


def test_reclaim_tells_of_what_the_dead_was_told(store: Store, client: redis.Redis) -> None:
    """It may have died between taking the token and claiming."""
    seed(client, {"q": [A], "{q}:consumers": {"A": 500}})
    store.leases.reclaim("q", "A")
    assert state(client) == {"q": [A], "{q}:wake": {"now": 0}}


def test_reclaimed_consumer_finds_nothing_of_its_own(store: Store, client: redis.Redis) -> None:
    seed(client, {"q": [A]})
    store.deliver("q", "A", 1, 1, lease_ms=100)
    store.now = "1100"
    store.leases.reclaim("q", "A")
    before = state(client)
    ack(store, "A", [1])
    assert store.release("q", "A", [1]) == 0
    assert store.bury("q", "A", [(1, "a", "rejected", b"")]) == 0
    assert store.park("q", "A", [(1, "a", 5000)]) == 0
    assert store.leases.renew("q", "A", 100) is None
    assert store.deliver("q", "A", 1, 2, lease_ms=100, leased=True) is None
    assert state(client) == before


# renew


def test_renew(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:consumers": {"A": 1500, "B": 1001}})
    assert store.leases.renew("q", "A", 30_000) == []
    assert state(client) == {"{q}:consumers": {"A": 31_000, "B": 1001}}


def test_renew_names_the_dead(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:consumers": {"A": 500, "B": 1000, "C": 999, "D": 1001}})
    assert store.leases.renew("q", "A", 30_000) == ["C", "B"]
    assert state(client)["{q}:consumers"] == {"A": 31_000, "B": 1000, "C": 999, "D": 1001}


def test_lost_lease_is_not_renewed(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:consumers": {"B": 500}})
    assert store.leases.renew("q", "A", 30_000) is None
    assert state(client) == {"{q}:consumers": {"B": 500}}


def test_the_dead_are_named_in_portions(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:consumers": {"A": 5000, **{f"dead{n}": 1 for n in range(150)}}})
    assert len(store.leases.renew("q", "A", 30_000) or ()) == 100


def test_the_last_one_to_leave_forgets_what_older_workers_have_kept(
    store: Store, client: redis.Redis
) -> None:
    for consumer in ("A", "B"):
        store.deliver("q", consumer, 1, 1, lease_ms=30_000)
    seed(client, {"{q}:granted-by": "a run id"})
    store.leases.leave("q", "A")
    assert state(client)["{q}:granted-by"] == "a run id"
    store.leases.leave("q", "B")
    assert state(client) == {}


# renew_all: many queues at once


def renew_all(store: Store, *renewed: str, queues: Sequence[str] = ("p", "q", "r")) -> Renewal:
    return store.leases.renew_all(queues, renewed, "A", 30_000, 90_000)


@pytest.mark.parametrize("at_once", [1, 2, 250])
def test_what_is_held_decides_how_long_it_lasts(
    at_once: int, store: Store, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "renewals_at_once", at_once)
    lasts = {f"{{{name}}}:consumers": {"A": 1500} for name in "pqr"}
    held = {"{p}:unacked:A": {"1": "0x"}, "{q}:gate:slots:A": {"1": "|a*1"}}
    seed(client, {**lasts, **held})
    found = renew_all(store, "p", "q", "r")
    assert (found.now_ms, found.own_end_ms, found.lost, found.idle) == (1000, 1500, [], {"r"})
    assert found.next_end_ms is None
    after = state(client)
    ends = [after[f"{{{name}}}:consumers"]["A"] for name in "pqr"]
    assert ends == [31_000, 31_000, 91_000]
    assert client.zscore("{r}:consumers", "A") == 91_000.5  # and so it is known for an idle one


OLD = "w:12:01234567"
IN_TIME, LATE, IDLE = (f"{OLD[:-1]}{n}-30000" for n in range(3))


@pytest.mark.parametrize("at_once", [1, 2, 250])
def test_only_what_is_asked_for_is_renewed(
    at_once: int, store: Store, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "renewals_at_once", at_once)
    ends = {
        "{p}:consumers": {"A": 1500, "B": 999, "C": 1200},
        "{q}:consumers": {"A": 1300, "B": 1000, LATE: 34_001, IN_TIME: 34_000, OLD: 34_001},
        "{r}:consumers": {"A": 1400, "D": 1100},
    }
    seed(client, ends)
    client.zadd("{q}:consumers", {IDLE: 150_999.5})
    found = renew_all(store)
    client.zrem("{q}:consumers", IDLE)
    assert state(client) == ends
    assert (found.own_end_ms, found.next_end_ms, found.lost) == (1300, 1100, [])
    assert sorted(found.others) == [("p", "B", 999), ("q", "B", 1000), ("q", LATE, 34_001)]


def test_what_was_lost_is_not_renewed(store: Store, client: redis.Redis) -> None:
    ends = {"{p}:consumers": {"A": 0}, "{q}:consumers": {"B": 5000}, "{r}:consumers": {"A": 900}}
    seed(client, ends)
    assert sorted(renew_all(store, "p", "q", "r").lost) == ["p", "q"]
    assert state(client) == {**ends, "{r}:consumers": {"A": 91_000}}


@pytest.mark.parametrize("gate", [None, Gate("v")])
def test_a_claim_makes_a_long_lease_short_where_it_takes_something(
    gate: Gate | None, store: Store, client: redis.Redis
) -> None:
    seed(client, {"{q}:consumers": {"A": 91_000}})
    for end_ms in (91_000, 31_000):
        store.deliver("q", "A", 1, 1, lease_ms=30_000, leased=True, gate=gate)
        assert state(client)["{q}:consumers"] == {"A": end_ms}
        seed(client, {"q": [A]})


def test_many_queues_cost_few_commands(store: Store, client: redis.Redis) -> None:
    queues = [f"q{n}" for n in range(500)]
    for queue in queues:
        client.zadd(store.keys(queue).consumers, {"A": 90_000, "B": 80_000})
    for renewed, most in ((), 16), (queues[:10], 30), (queues, 530):
        before = client.info("stats")["total_commands_processed"]
        renew_all(store, *renewed, queues=queues)
        after = client.info("stats")["total_commands_processed"]
        assert after - before <= most


def test_a_thousand_idle_queues(
    store: Store, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands a second, with those inside of scripts; the default lease."""
    monkeypatch.setattr(Keeper, "watch", lambda keeper, lease: None)
    lease, at = Lease(store, 30.0, object()), 1_000_000.0
    monkeypatch.setattr(lease, "clock", lambda: at)
    store.now = str(int(at * 1000))
    for n in range(1000):
        asked = lease.ask(f"q{n}")
        store.deliver(f"q{n}", lease.consumer, 1, 1, lease_ms=lease.ms)
        lease.grant(f"q{n}", asked, False)
    before, began, end = client.info("stats")["total_commands_processed"], at, at + 1200
    while at < end:
        at += lease.step()
        store.now = str(int(at * 1000))
    spent = client.info("stats")["total_commands_processed"] - before
    assert not lease.lost
    assert spent / (at - began) <= 13


def test_a_connection_that_is_closed_while_idle_delays_no_reclaim(
    store: Store, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As servers, proxies and load balancers do it that have an idle timeout."""
    monkeypatch.setattr(Keeper, "watch", lambda keeper, lease: None)
    lease, at = Lease(store, 30.0, object()), 1_000_000.0
    monkeypatch.setattr(lease, "clock", lambda: at)
    store.now = str(int(at * 1000))
    asked = lease.ask("q")
    store.deliver("q", lease.consumer, 1, 1, lease_ms=lease.ms)
    lease.grant("q", asked, False)
    store.publish("q", [entry("a")])
    store.deliver("q", f"dead:1:{'0' * 8}-30000", 1, 1, lease_ms=30_000)
    end = at + 45
    while at < end and not store.size("q").ready:
        store.run._connection._sock.shutdown(socket.SHUT_RDWR)
        monkeypatch.setattr(store.run, "_used_at", -math.inf)
        at += lease.step()
        store.now = str(int(at * 1000))
    assert store.size("q").ready == 1


def test_a_lease_of_an_expiring_queue_outlasts_who_leaves(
    store: Store, client: redis.Redis
) -> None:
    ours, other = f"a:1:{'0' * 8}-300", f"b:1:{'0' * 8}-300"
    store.publish("q", [entry("a")], 1_000)
    for consumer in (ours, other):
        store.deliver("q", consumer, 1, 1, lease_ms=300, expires_ms=1_000)
    store.leases.leave("q", other)
    client.pexpire(store.keys("q").unacked(ours), 500)
    assert store.leases.renew("q", ours, 300) is not None
    assert client.pttl(store.keys("q").unacked(ours)) > 500


def test_names_that_are_no_text(store: Store) -> None:
    name = b"w@\xff:1".decode(errors="surrogateescape")
    store.publish("q", [entry("a")])
    store.deliver("q", name, 1, 1, lease_ms=500)
    store.deliver("q", "B", 1, 1, lease_ms=500)
    assert store.leases.consumers("q") == [("B", 500, 0), (name, 500, 1)]
    store.now = "1500"
    assert store.leases.renew("q", "B", 500) == [name]
    assert store.leases.reclaim("q", name) == 1
    assert store.leases.consumers("q") == [("B", 500, 0)]


# A reclaim is of the lease that was found dead.


@pytest.mark.parametrize(("ended_ms", "count"), [(900, 1), (901, 0), (5000, 0), (None, 1)])
def test_reclaim_only_what_was_not_renewed_since(
    ended_ms: int | None, count: int, store: Store, client: redis.Redis
) -> None:
    seed(client, {"{q}:unacked:A": {"1": "0" + A}, "{q}:consumers": {"A": 900}})
    assert store.leases.reclaim("q", "A", ended_ms) == count


def test_reclaim_of_a_lease_that_ends_too_late(store: Store, client: redis.Redis) -> None:
    """The clock that granted it was ahead."""
    seed(client, {"{q}:unacked:A": {"1": "0" + A}, "{q}:consumers": {"A": 10**9}})
    assert store.leases.reclaim("q", "A") == 0
    assert store.leases.reclaim("q", "A", 10**9) == 1


# sort_held: much at once

MUCH = 5000
ALL = [str(tag) for tag in range(MUCH)]


@pytest.fixture
def much(client: redis.Redis) -> None:
    """A holds 5,000 messages, and its lease has ended."""
    client.hset("{q}:unacked:A", mapping={tag: "0" + tag for tag in ALL})
    seed(client, {"{q}:consumers": {"A": 900}})


def sort_held(store: Store, cursor: Any = 0) -> bytes:
    return store.ask("sort_held", "q", "A", cursor=cursor, count=1000)


def all_sorted(store: Store) -> int:
    """Sort it all; returns in how many calls."""
    cursor, calls = sort_held(store), 1
    while int(cursor):
        cursor, calls = sort_held(store, cursor), calls + 1
    return calls


ENDINGS: dict[str, Callable[[Store], Any]] = {
    "reclaim": lambda store: store.leases.reclaim("q", "A"),
    "leave": lambda store: store.leases.leave("q", "A"),
}


@pytest.fixture(params=ENDINGS)
def ending(request: pytest.FixtureRequest) -> Callable[[Store], Any]:
    return ENDINGS[request.param]


@pytest.mark.usefixtures("much")
def test_tags_are_sorted_a_part_a_call(store: Store, client: redis.Redis) -> None:
    assert sort_held(store) != b"0"
    assert 500 <= client.zcard("{q}:held:A") <= 2000
    assert 3 <= all_sorted(store) <= 10
    for _ in range(2):
        assert client.zrange("{q}:held:A", 0, -1) == [tag.encode() for tag in ALL]
        assert client.hlen("{q}:unacked:A") == MUCH
        all_sorted(store)


def test_nothing_to_sort(store: Store, client: redis.Redis) -> None:
    assert sort_held(store) == b"0"
    assert state(client) == {}


@pytest.mark.usefixtures("much")
def test_much_goes_back_in_order(
    ending: Callable[[Store], Any], store: Store, client: redis.Redis
) -> None:
    seed(client, {"q": ["last"]})
    assert ending(store) in (MUCH, None)
    assert state(client) == {"q": [*ALL, "last"], "{q}:wake": {"now": 0}}


@pytest.mark.usefixtures("much")
def test_much_at_once_is_never_sorted_in_one_call(
    ending: Callable[[Store], Any], store: Store, client: redis.Redis
) -> None:
    client.config_resetstat()
    ending(store)
    counts = {name: each["calls"] for name, each in client.info("commandstats").items()}
    assert counts["cmdstat_hscan"] >= 3
    # What is left in the end is sorted at one go, and that is no more than a call sorts.
    assert counts.get("cmdstat_hkeys", 0) <= 1 + 1000 // 250


@pytest.mark.usefixtures("much")
@pytest.mark.parametrize("sorts", ["once", "all"])
@pytest.mark.parametrize("gives_back", [0, 1, 3])
def test_killed_half_way(
    sorts: str,
    gives_back: int,
    ending: Callable[[Store], Any],
    store: Store,
    client: redis.Redis,
) -> None:
    """Who reclaims dies; another one sorts anew."""
    if sorts == "all":
        all_sorted(store)
    for _ in range(gives_back if sorts == "all" else 0):
        assert call(store, "reclaim", "A")[0] == 250
    if sorts == "once":
        sort_held(store)
    ending(store)
    assert state(client) == {"q": ALL, "{q}:wake": {"now": 0}}


@pytest.mark.usefixtures("much")
def test_two_reclaim_at_once(store: Store, client: redis.Redis) -> None:
    cursor = sort_held(store)
    all_sorted(store)
    assert call(store, "reclaim", "A") == [250, MUCH - 250]
    while int(cursor):
        cursor = sort_held(store, cursor)
        assert call(store, "reclaim", "A")[0] == 250
    assert store.leases.reclaim("q", "A") > 0
    assert state(client) == {"q": ALL, "{q}:wake": {"now": 0}}


@pytest.mark.usefixtures("much")
@pytest.mark.parametrize("kept", [0, 1, 249, 251, 1200])
def test_what_was_acked_meanwhile_is_passed_over(
    kept: int, ending: Callable[[Store], Any], store: Store, client: redis.Redis
) -> None:
    all_sorted(store)
    call(store, "reclaim", "A")
    ack(store, "A", [int(tag) for tag in ALL[kept : MUCH - 250]])
    ending(store)
    assert state(client) == {"q": [*ALL[:kept], *ALL[-250:]], "{q}:wake": {"now": 0}}


@pytest.mark.usefixtures("much")
@pytest.mark.parametrize("acked", [1, 4500, 4750])
def test_consumer_that_wakes_up_in_the_middle(
    acked: int, ending: Callable[[Store], Any], store: Store, client: redis.Redis
) -> None:
    """It is told, can claim nothing more, and what it has finished meanwhile is not delivered."""
    seed(client, {"{q}:consumers": {"A": 9, "B": 1e9}})
    all_sorted(store)
    call(store, "reclaim", "A")
    assert store.leases.renew("q", "A", 100) is None
    for leased in (True, False):
        assert store.deliver("q", "A", 5, MUCH, lease_ms=100, leased=leased) is None
    assert store.leases.renew("q", "B", 100) == ["A"]
    ack(store, "A", list(range(acked)))
    ending(store)
    assert state(client) == {
        "q": ALL[acked:],
        "{q}:wake": {"now": 0},
        "{q}:consumers": {"B": 1100},
    }


@pytest.mark.usefixtures("much")
def test_lease_that_lasts_is_left_alone_with_much(store: Store, client: redis.Redis) -> None:
    client.zadd("{q}:consumers", {"A": 1001})
    assert store.leases.reclaim("q", "A") == 0
    after = state(client)
    assert after["{q}:unacked:A"] == {tag: "0" + tag for tag in ALL}
    assert "q" not in after
    ack(store, "A", list(range(MUCH)))
    store.leases.leave("q", "A")
    assert state(client) == {}


@pytest.mark.usefixtures("much")
def test_much_of_which_some_is_poison(store: Store, client: redis.Redis) -> None:
    store.limits = Limits(max_deliveries=2)
    tried = [tag for tag in ALL if tag.endswith("7")]
    texts = {tag: returned(message(tag, headers={"id": tag}), 1) for tag in tried}
    client.hset("{q}:unacked:A", mapping={tag: "0" + text for tag, text in texts.items()})
    assert store.leases.reclaim("q", "A") == MUCH
    after = state(client)
    assert after["q"] == [tag for tag in ALL if tag not in texts]
    assert after["{q}:dead-messages"] == {tag: "0" + text for tag, text in texts.items()}
    assert after["{q}:dead"] == dict.fromkeys(tried, 1000)
    assert "{q}:held:A" not in after


# recover


@pytest.mark.parametrize(("seen", "tags"), [(0, [1, 2, 3, 10]), (2, [3, 10]), (9, [10]), (10, [])])
def test_recover(seen: int, tags: list[int], store: Store, client: redis.Redis) -> None:
    before = {"{q}:unacked:A": {"10": "0" + D, **HELD}}
    seed(client, before)
    records = {1: "0" + A, 2: "3" + B, 3: "0" + C, 10: "0" + D}
    assert store.leases.recover("q", "A", seen) == [(tag, records[tag].encode()) for tag in tags]
    assert state(client) == before


def test_recover_many_in_bounded_calls(
    store: Store, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.hset("{q}:unacked:A", mapping={str(tag): "0x" for tag in range(10_000)})
    pages, run = [], store.run

    def running(*command: Any) -> Any:
        pages.append(run(*command))
        return pages[-1]

    monkeypatch.setattr(store, "run", running)
    assert [tag for tag, _ in store.leases.recover("q", "A", 99)] == list(range(100, 10_000))
    assert max(map(len, pages)) < 4 * CALL_LIMIT


# park


def test_park(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:unacked:A": HELD})
    assert store.park("q", "A", [(1, "a", 3000), (2, "b", 4000), (9, "x", 1500)]) == 2
    assert state(client) == {
        "{q}:partitions": {"3000": 3000},
        "{q}:delayed:3000": {"a": 3000, "b": 4000},
        "{q}:messages": {"a": "0" + A, "b": "3" + B},
        "{q}:unacked:A": {"3": "0" + C},
        "{q}:wake": {"due": 3000},
    }


def test_park_beside_what_waits_longer(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:unacked:A": HELD})
    store.schedule("q", [entry("d", 3500)])
    client.delete("{q}:wake")
    store.park("q", "A", [(1, "a", 4000)])
    assert "{q}:wake" not in state(client)
    store.park("q", "A", [(2, "b", 3000)])
    assert state(client)["{q}:wake"] == {"due": 3000}


def test_park_under_a_taken_id(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:unacked:A": HELD})
    store.schedule("q", [entry("a", 2000, body="other")])
    assert store.park("q", "A", [(1, "a", 3000)]) == 1
    after = state(client)
    assert after["{q}:messages"] == {"a": "0" + message("other"), "a\x1f2": "0" + A}
    assert after["{q}:duplicates"] == {"a": "2"}


def test_park_of_what_waits_already(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("a", 2000)])
    before = state(client)
    seed(client, {"{q}:unacked:A": {"1": "0" + A}})
    assert store.park("q", "A", [(1, "a", 2000)]) == 1
    assert state(client) == before


@pytest.mark.parametrize("entries", [[], [(9, "x", 3000)]])
def test_park_of_nothing(
    entries: list[tuple[int, str, int]], store: Store, client: redis.Redis
) -> None:
    seed(client, {"{q}:unacked:A": HELD})
    assert store.park("q", "A", entries) == 0
    assert state(client) == {"{q}:unacked:A": HELD}


def test_park_splits(client: redis.Redis) -> None:
    store = Store(client, partition_size=2, now="1000")
    seed(client, {"{q}:unacked:A": HELD})
    store.park("q", "A", [(1, "a", 3000), (2, "b", 4000), (3, "c", 5000)])
    assert len(state(client)["{q}:partitions"]) == 3
