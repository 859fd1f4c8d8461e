from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import redis

from kombu_delayed.errors import WrongType
from kombu_delayed.inspection.doctor import examine_queues
from kombu_delayed.message.ticket import Gate, LimitNumbers
from kombu_delayed.store.claimable import Delivered
from kombu_delayed.store.keys import SEPARATOR
from kombu_delayed.store.ledgers import Job, LedgerStore
from kombu_delayed.store.store import Store
from tests.kit.claims import bodies, deliver, records
from tests.kit.state import entry, message, promoted, seed, state

A, B, C, D = (message(body) for body in "abcd")
LEASE = {"{q}:consumers": {"A": 31_000}}
NOW_TOKEN = {"{q}:wake": {"now": 0}}


def test_the_last_one_that_was_delayed_takes_its_token_along(
    store: Store, client: redis.Redis
) -> None:
    """The token was not taken yet: it would wake a consumer in vain and stay in an empty queue."""
    store.schedule("q", [entry("x", 2000)])
    assert state(client)["{q}:wake"] == {"due": 2000}
    store.now = "3000"
    assert bodies(deliver(store)) == ["x"]
    assert "{q}:wake" not in state(client)


def test_what_is_handed_out_at_once_is_not_written_to_the_ready_list(
    store: Store, client: redis.Redis
) -> None:
    """Otherwise it would go twice to the append-only file and to each replica."""
    store.schedule("q", [entry(id, due) for id, due in zip("abcd", range(2001, 2005), strict=True)])
    client.rpush("q", A)
    store.now = "9000"
    client.config_resetstat()
    assert bodies(deliver(store, want=3)) == ["a", "a", "b"]
    assert written(client) == {"q": 1}
    assert bodies(deliver(store, want=3, tag=4)) == ["c", "d"]
    store.schedule("q", [entry("e", 9001)])
    store.now = "9002"
    client.config_resetstat()
    assert bodies(deliver(store, want=3, tag=7)) == ["e"]
    assert written(client) == {}


def test_what_falls_due_without_room_is_ready(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("a", 2000), entry("b", 2001)])
    store.now = "9000"
    assert bodies(deliver(store, want=0)) == []
    assert client.lrange("q", 0, -1) == [promoted(B, 2001).encode(), promoted(A, 2000).encode()]
    assert bodies(deliver(store, want=3)) == ["a", "b"]


def written(client: redis.Redis) -> dict[str, int]:
    """The number of calls that have pushed to a list since the statistics were reset."""
    calls: Any = client.info("commandstats").get("cmdstat_lpush", {})
    return {"q": calls["calls"]} if calls else {}


def test_priorities(store: Store, client: redis.Redis) -> None:
    low, mid = "q" + SEPARATOR + "9", "q" + SEPARATOR + "3"
    seed(client, {low: [A], mid: [B, C], "q": [D]})
    answer = deliver(store, want=3)
    assert records(answer) == ["0" + D, "3" + B, "3" + C]
    assert answer.more
    held = {"1": "0" + D, "2": "3" + B, "3": "3" + C}
    assert state(client) == {**LEASE, **NOW_TOKEN, low: [A], "{q}:unacked:A": held}
    assert records(deliver(store, want=3, tag=4)) == ["9" + A]


@pytest.mark.parametrize("want", [3999, 4000, 10_000])
def test_any_number_of_messages_is_recorded(want: int, store: Store, client: redis.Redis) -> None:
    client.rpush("q", *[A] * 10_000)
    assert len(deliver(store, want=want).records) == want
    assert client.hlen("{q}:unacked:A") == want
    assert client.llen("q") == 10_000 - want


def test_stock_messages_and_steps_of_other_transports(store: Store, client: redis.Redis) -> None:
    seed(client, {"q": ["not JSON", "{}", ""]})
    assert records(deliver(store)) == ["0not JSON", "0{}", "0"]


def test_promotion(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("a", 2000), entry("b", 3000)])
    store.now = "2500"
    record = "0" + promoted(A, 2000)
    assert deliver(store) == Delivered(2500, 3000, False, 1, [record.encode()])
    assert state(client) == {
        "{q}:partitions": {"2000": 2000},
        "{q}:delayed:2000": {"b": 3000},
        "{q}:messages": {"b": "0" + B},
        "{q}:consumers": {"A": 32_500},
        "{q}:unacked:A": {"1": record},
        "{q}:armed": "3000 A",
        "{q}:wake": {"due": 2000},
    }


@pytest.mark.parametrize(("now", "count"), [("1999", 0), ("2000", 1), ("2001", 2)])
def test_never_early(now: str, count: int, store: Store) -> None:
    store.schedule("q", [entry("a", 2000), entry("b", 2001)])
    store.now = now
    assert len(deliver(store).records) == count


def test_promoted_by_priority(store: Store) -> None:
    store.schedule("q", [entry("a", 2000, 9), entry("b", 2001, 3), entry("c", 2002)])
    store.now = "3000"
    expected = ["0" + promoted(C, 2002), "3" + promoted(B, 2001), "9" + promoted(A, 2000)]
    assert records(deliver(store)) == expected


@pytest.mark.parametrize("damaged", ["", "0", "02000no JSON", "no JSON", "0{}"])
def test_what_was_damaged_stops_no_other(damaged: str, store: Store, client: redis.Redis) -> None:
    """A consumer gets it, and buries a message it cannot read."""
    store.schedule("q", [entry(id, 2000) for id in "abc"])
    client.hset("{q}:messages", "b", damaged)
    store.now = "2000"
    found = records(deliver(store))
    assert len(found) == 3
    assert {"0" + promoted(A, 2000), "0" + promoted(C, 2000)} < set(found)
    assert store.size("q").delayed == 0


def test_member_without_its_message_is_passed_over(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("a", 2000), entry("b", 2001)])
    client.hdel("{q}:messages", "a")
    store.now = "3000"
    assert bodies(deliver(store)) == ["b"]
    assert "{q}:partitions" not in state(client)


@pytest.mark.parametrize("gate", [None, Gate("v1")])
def test_a_partition_that_was_evicted_stops_no_other(
    gate: Gate | None, store: Store, client: redis.Redis
) -> None:
    store.partition_size = 2
    store.schedule("q", [entry(str(n), 2000 + n) for n in range(6)])
    names = client.zrange("{q}:partitions", 0, -1)
    keys = [b"{q}:delayed:" + name for name in names]
    left = [id.decode() for key in keys[2:] for id in client.zrange(key, 0, -1)]
    client.delete(*keys[:2])
    store.now = "3000"
    found: list[str] = []
    for tag in (1, 11):  # the first call finds the second partition gone
        found += bodies(deliver(store, tag=tag, gate=gate))
    assert found == left != []
    assert not client.exists("{q}:partitions")
    fixed = {each.kind: each.fixed for each in examine_queues(store, ["q"], fix=True)}
    assert fixed["orphan"] == 6 - len(left)
    assert len(deliver(store, tag=21, gate=gate).records) == 6 - len(left)


@pytest.mark.parametrize(("promotions", "size"), [(1, 128), (3, 128), (3, 2), (5, 4)])
def test_promotions_are_bounded(
    promotions: int, size: int, store: Store, client: redis.Redis
) -> None:
    store.partition_size = size
    store.schedule("q", [entry(str(n), 2000 + n) for n in range(10)])
    store.now = "3000"
    left = 10
    while left:
        answer = deliver(store, tag=100 - left, promotions=promotions)
        assert len(answer.records) == min(promotions, left)
        left -= len(answer.records)
        assert store.size("q").due == left
        assert answer.more is (left > 0)
        assert ("now" in state(client).get("{q}:wake", {})) is (left > 0)


def test_lease_is_renewed(store: Store, client: redis.Redis) -> None:
    deliver(store)
    store.now = "5000"
    assert deliver(store, leased=True).now_ms == 5000
    assert state(client)["{q}:consumers"] == {"A": 35_000}


def test_lost_lease_takes_nothing(store: Store, client: redis.Redis) -> None:
    before = {**NOW_TOKEN, "q": [A], "{q}:consumers": {"B": 9000}}
    seed(client, before)
    assert store.deliver("q", "A", 1, 1, lease_ms=30_000, leased=True) is None
    assert state(client) == before


def test_without_lease_nothing_stays(store: Store, client: redis.Redis) -> None:
    seed(client, {"q": [A]})
    assert deliver(store, lease_ms=0) == Delivered(1000, 0, False, 0, [f"0{A}".encode()])
    assert state(client) == {}


@pytest.mark.parametrize(
    ("why", "armed", "leases", "ready", "call", "then_armed", "then_wake"),
    [
        ("the first one makes it", "", "", 0, {}, "2000 A", {}),
        ("alone", "2000 A", "A", 1, {}, "2000 A", {}),
        ("who got nothing keeps it", "2000 A", "AB", 0, {}, "2000 A", {}),
        ("who got messages passes it on", "2000 A", "AB", 1, {}, "2000 A*", {"due": 2000}),
        ("there is more", "2000 A", "AB", 2, {"want": 1}, "2000 A*", {"due": 2000, "now": 0}),
        ("who got messages passes one on", "", "AB", 1, {}, "2000 A*", {"due": 2000}),
        ("who wants nothing keeps it", "2000 A", "AB", 1, {"want": 0}, "2000 A", {"now": 0}),
        ("who does not wait leaves it", "2000 A", "AB", 1, {"waits": False}, "2000 A", {}),
        ("another's stays", "2000 B", "AB", 0, {}, "2000 B", {}),
        ("another's that is passed on is taken over", "2000 B*", "AB", 0, {}, "2000 A", {}),
        ("who looks after it keeps it", "2000 A*", "AB", 0, {}, "2000 A", {}),
        ("an earlier one stays", "1500 B", "AB", 0, {}, "1500 B", {}),
        ("a later one is taken over", "2500 B", "AB", 0, {}, "2000 A", {}),
        ("an overdue one is taken over", "1000 B", "AB", 0, {}, "2000 A", {}),
        ("one's own is put off", "1500 A", "AB", 0, {}, "2000 A", {}),
        ("a newcomer takes it over", "2000 B", "B", 0, {}, "2000 A", {}),
        ("a newcomer with messages passes it on", "2000 B", "B", 1, {}, "2000 A*", {"due": 2000}),
        ("a newcomer that does not wait", "2000 B", "B", 0, {"waits": False}, "2000 B", {}),
        ("who takes for good is no newcomer", "2000 B", "B", 0, {"lease_ms": 0}, "2000 B", {}),
    ],
)
def test_promise(
    why: str,
    armed: str,
    leases: str,
    ready: int,
    call: dict[str, Any],
    then_armed: str,
    then_wake: dict[str, int],
    store: Store,
    client: redis.Redis,
) -> None:
    """A claims from a queue whose next message is due at 2000; who has promised is told so.

    A consumer that passes the promise on checks later: the one that took the token may be dead.
    """
    store.schedule("q", [entry("d", 2000)])
    client.delete("{q}:wake")
    seed(client, {"{q}:armed": armed, "{q}:consumers": dict.fromkeys(leases, 9000)})
    seed(client, {"q": [A, B][:ready]})
    answer = deliver(store, leased="A" in leases, **call)
    has_promised = then_armed.rstrip("*") == "2000 A" and call.get("waits", True)
    comes_at_ms = 2500 if then_armed.endswith("*") else 2000
    assert answer.next_due_ms == (comes_at_ms if has_promised else 0)
    after = state(client)
    assert (after.get("{q}:armed", ""), after.get("{q}:wake", {})) == (then_armed, then_wake)


def test_promise_ends_with_the_backlog(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("a", 2000)])
    deliver(store, "A")
    store.now = "2000"
    assert bodies(deliver(store, "B")) == ["a"]
    assert state(client)["{q}:armed"] == "2000 A", "it is another's"
    assert deliver(store, "A").next_due_ms == 0
    assert "{q}:armed" not in state(client)


def established(store: Store, *names: str) -> None:
    """Make consumers claim nothing: they have a lease from then on, but no promise."""
    for name in names:
        deliver(store, name, want=0, waits=False)


def test_names_with_blanks_hold_promises(store: Store) -> None:
    names = ("host a:1", "host", "a:1")
    store.schedule("q", [entry("a", 2000)])
    established(store, *names)
    for name in (*names, names[0]):
        told = deliver(store, name, leased=True).next_due_ms
        assert told == (2000 if name == "host a:1" else 0)


def test_all_but_the_backlog_expires(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("a", 2000), entry("b", 2001), entry("c", 9000)])
    seed(client, {"q" + SEPARATOR + "6": [D, D]})
    store.now = "3000"
    deliver(store, "A-30000", want=1, expires_ms=60_000)
    for key in state(client):
        if key.startswith(("{q}:delayed:", "{q}:messages", "{q}:partitions")):
            assert client.pttl(key) == -1
        elif key.startswith(("{q}:consumers", "{q}:unacked", "{q}:expires")):
            assert 60_000 < client.pttl(key) <= 60_000 + 10 * 30_000
        else:
            assert 0 < client.pttl(key) <= 60_000


@pytest.mark.parametrize(
    ("first_ms", "second", "call"),
    [
        pytest.param(60_000, "B", {"expires_ms": 60_000}, id="older workers renew it"),
        pytest.param(0, "B-0", {"expires_ms": 1000, "lease_ms": 0}, id="one takes for good"),
    ],
)
def test_leases_that_do_not_expire(
    first_ms: int, second: str, call: dict[str, int], store: Store, client: redis.Redis
) -> None:
    seed(client, {"q": [A, B, C]})
    deliver(store, "A-30000", want=1, expires_ms=first_ms)
    assert client.pttl("q") == -1 or first_ms
    deliver(store, second, want=1, **call)
    assert client.pttl("{q}:consumers") == -1


@pytest.mark.parametrize("gate", [None, Gate("v", (LimitNumbers("all", 3),))])
@pytest.mark.parametrize("held", ["q", f"q{SEPARATOR}9"])
@pytest.mark.parametrize("delayed", [["a", "b"], []])
def test_nothing_is_lost_where_a_list_was_overwritten(
    store: Store, client: redis.Redis, gate: Gate | None, held: str, delayed: list[str]
) -> None:
    """An empty list is no key: another program may use its name."""
    store.schedule(
        "q", [entry(id, 2000, step=step) for id, step in zip(delayed, (0, 9), strict=False)]
    )
    store.publish("q", [entry(id, step=step) for id, step in (("c", 3), ("d", 6))])
    client.set(held, "not ours")
    store.now = "9000"
    got: list[str] = []
    for tag in range(10, 20, 3):
        with suppress(WrongType):
            got += bodies(deliver(store, want=3, tag=tag, gate=gate))
    client.delete(held)
    for tag in range(20, 30, 3):
        got += bodies(deliver(store, want=3, tag=tag, gate=gate))
    assert sorted(got) == [*delayed, "c", "d"]


def test_nothing_is_stored_by_halves_where_a_list_was_overwritten(
    store: Store, client: redis.Redis
) -> None:
    client.set("q", "not ours")
    job = LedgerStore(store, Job("j", "run", 60))
    for into in (store, job):
        with pytest.raises(WrongType):
            into.schedule("q", [entry("a", 8000), entry("b", 500)])
    client.delete("q")
    assert not [each for each in examine_queues(store, ["q"]) if each.kind == "orphan"]
    assert job.schedule("q", [entry("c", 8000), entry("b", 500)]).ready == 1


@pytest.mark.parametrize("gate", [None, Gate("v", ())], ids=["no gate", "gate"])
@pytest.mark.parametrize("steps", ["0", "90"])
@pytest.mark.parametrize("smaller", [1, 100])
def test_the_bytes_of_what_is_promoted_are_bounded(
    store: Store, client: redis.Redis, gate: Gate | None, steps: str, smaller: int
) -> None:
    """250 messages of two megabytes once blocked the server for seconds."""
    large = [f"{number}-" + "x" * 200_000 for number in range(40)]
    sent = [str(number) for number in range(smaller)] + large
    for step in steps:
        store.schedule("q", [entry(id, 2000 + n, int(step)) for n, id in enumerate(sent)])
    store.now = "9000"
    before = len(sent) * len(steps)
    deliver(store, want=0, gate=gate)
    ready = client.llen("q") + client.llen(f"q{SEPARATOR}9")
    assert 0 < ready <= smaller * 2 + 3 * 10
    got: dict[str, list[str]] = {step: [] for step in steps}
    tag = 1
    while (answer := deliver(store, want=7, tag=tag, gate=gate)).records:
        for record, body in zip(records(answer), bodies(answer), strict=True):
            got[record[0]].append(body)
        tag += len(answer.records)
        assert answer.more or tag > before
    assert all(sorted(found) == sorted(sent) for found in got.values())
    assert gate or all(found == sent for found in got.values())


@pytest.mark.parametrize("gate", [None, Gate("v", ())], ids=["no gate", "gate"])
@pytest.mark.parametrize("smaller", [0, 100])
def test_the_bytes_of_an_answer_are_bounded(
    store: Store, client: redis.Redis, gate: Gate | None, smaller: int
) -> None:
    """A thousand messages of 200 kB once blocked the server for seconds."""
    sent = [str(number) for number in range(smaller + 40)]
    large = [message(f"{id}-" + "x" * 200_000) for id in sent[smaller:]]
    client.lpush("q", *(message(f"{id}-") for id in sent[:smaller]), *large)
    store.schedule("q", [entry("due", 2000, body="due-")])
    store.now = "9000"
    got: list[str] = []
    while (answer := deliver(store, want=1000, tag=len(got) + 1, gate=gate)).records:
        got += [body.partition("-")[0] for body in bodies(answer)]
        assert sum(map(len, answer.records)) < 2**20 + 201_000
        assert answer.more or len(got) == len(sent) + 1
    assert got == [*sent, "due"]
    assert client.hlen("{q}:unacked:A") == len(got)
