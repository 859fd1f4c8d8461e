from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from kombu_delayed.message.ticket import Gate
from kombu_delayed.store.keys import SEPARATOR
from kombu_delayed.store.leases import Renewal
from kombu_delayed.store.store import CALL_LIMIT, Limits, Store
from tests.kit.claims import ack, deliver
from tests.kit.state import entry, message, returned, seed, state

A, B, C, D = (message(body) for body in "abcd")
MID = "q" + SEPARATOR + "3"
HELD = {"1": "0" + A, "2": "3" + B, "3": "0" + C}
NOW_TOKEN = {"{q}:wake": {"now": 0}}


def reclaim_once(store: Store) -> list[int]:
    """Make one call, where the store repeats until none is left; returns how many went and stay."""
    found: list[int] = store.ask("reclaim", "q", "A", limit=CALL_LIMIT, ended_ms="")
    return found


@pytest.mark.parametrize("event_limit", [0, 100])
@pytest.mark.parametrize(("tags", "left"), [([1, 3], ["2"]), ([3, 99], ["1", "2"])])
def test_ack(
    tags: list[int], left: list[str], event_limit: int, store: Store, client: redis.Redis
) -> None:
    store.event_limit = event_limit
    others = {"{r}:unacked:A": HELD, "{q}:unacked:B": HELD}
    seed(client, {"{q}:unacked:A": HELD, **others})
    ack(store, *tags)
    assert state(client) == {"{q}:unacked:A": {tag: HELD[tag] for tag in left}, **others}


def test_refused_ack_is_reported(store: Store, client: redis.Redis) -> None:
    client.set("{q}:unacked:A", "not a hash")
    refused: list[int] = []
    store.ack("q", "A", [1], on_error=lambda: refused.append(1))
    store.size("q")
    assert refused == [1]


def test_release_of_any_number(store: Store, client: redis.Redis) -> None:
    client.hset("{q}:unacked:A", mapping={str(tag): f"0{tag}" for tag in range(10_000)})
    assert store.release("q", "A", range(10_000)) == 10_000
    assert state(client)["q"] == [str(tag) for tag in range(10_000)]


def test_leave(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("d", 2000)])
    backlog = state(client)
    ends = {"A": 9000, "B": 9000}
    seed(client, {"{q}:unacked:A": HELD, "{q}:consumers": ends, "{q}:armed": "2000 A"})
    client.delete("{q}:wake")
    for _ in range(2):
        store.leases.leave("q", "A")
        assert state(client) == {
            **backlog,
            "q": [returned(A, 0), returned(C, 0)],
            MID: [returned(B, 0)],
            "{q}:consumers": {"B": 9000},
            "{q}:wake": {"now": 0, "due": 2000},
        }


@pytest.mark.parametrize(
    "lease", [{}, {"{q}:consumers": {"A": 1000}}, {"{q}:consumers": {"A": 999}}]
)
def test_reclaim(lease: dict[str, Any], store: Store, client: redis.Redis) -> None:
    seed(client, {"q": [D], "{q}:unacked:A": HELD, **lease})
    assert store.leases.reclaim("q", "A") == 3
    assert state(client) == {
        **NOW_TOKEN,
        "q": [returned(A, 1), returned(C, 1), D],
        MID: [returned(B, 1)],
    }


@pytest.mark.parametrize("way", ["reclaim", "leave", "release"])
@pytest.mark.parametrize("small", [0, 1_000])
def test_large_messages_go_back_a_few_at_a_time(
    way: str, small: int, store: Store, client: redis.Redis
) -> None:
    """250 messages of two megabytes once blocked the server for seconds."""
    large = ["0" + message(f"{n}-" + "x" * 200_000) for n in range(20)]
    held = [*(["0" + A] * small), *large]
    seed(client, {"{q}:consumers": {"A": 1000}})
    client.hset("{q}:unacked:A", mapping={str(tag): each for tag, each in enumerate(held)})
    client.config_resetstat()
    if way == "release":
        assert store.release("q", "A", range(len(held))) == len(held)
    else:
        getattr(store.leases, way)("q", "A")
    stats: Any = client.info("commandstats")
    assert stats["cmdstat_evalsha"]["calls"] >= 4 + small // 250 * (way == "release")
    assert not client.exists("{q}:unacked:A")
    found = [each.decode() for each in reversed(client.lrange("q", 0, -1))]
    assert found == [returned(each[1:], int(way == "reclaim")) for each in held]


def test_lease_that_lasts_is_left_alone(store: Store, client: redis.Redis) -> None:
    before = {"{q}:unacked:A": HELD, "{q}:consumers": {"A": 1001}, "{q}:armed": "2000 A"}
    seed(client, before)
    assert store.leases.reclaim("q", "A") == 0
    assert state(client) == before


def test_reclaim_hands_the_promise_back(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("d", 2000)])
    backlog = state(client)
    seed(client, {"{q}:armed": "2000 A", "{q}:consumers": {"A": 500}})
    client.delete("{q}:wake")
    assert store.leases.reclaim("q", "A") == 0
    assert state(client) == backlog


@pytest.mark.parametrize(("ended_ms", "count"), [(900, 1), (901, 0), (5000, 0), (None, 1)])
def test_reclaim_only_what_was_not_renewed_since(
    ended_ms: int | None, count: int, store: Store, client: redis.Redis
) -> None:
    seed(client, {"{q}:unacked:A": {"1": "0" + A}, "{q}:consumers": {"A": 900}})
    assert store.leases.reclaim("q", "A", ended_ms) == count


def test_reclaim_of_a_lease_that_ends_too_late(store: Store, client: redis.Redis) -> None:
    """The clock was ahead when it was granted."""
    seed(client, {"{q}:unacked:A": {"1": "0" + A}, "{q}:consumers": {"A": 10**9}})
    assert store.leases.reclaim("q", "A") == 0
    assert store.leases.reclaim("q", "A", 10**9) == 1


def test_renew_names_the_dead(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:consumers": {"A": 1500, "B": 1000, "C": 999, "D": 1001}})
    assert store.leases.renew("q", "A", 30_000) == ["C", "B"]
    assert state(client) == {"{q}:consumers": {"A": 31_000, "B": 1000, "C": 999, "D": 1001}}


def test_lost_lease_is_not_renewed(store: Store, client: redis.Redis) -> None:
    seed(client, {"{q}:consumers": {"B": 500}})
    assert store.leases.renew("q", "A", 30_000) is None
    assert state(client) == {"{q}:consumers": {"B": 500}}


def test_the_last_one_to_leave_forgets_what_older_workers_have_kept(
    store: Store, client: redis.Redis
) -> None:
    for consumer in ("A", "B"):
        deliver(store, consumer)
    seed(client, {"{q}:granted-by": "a run id"})
    store.leases.leave("q", "A")
    assert state(client)["{q}:granted-by"] == "a run id"
    store.leases.leave("q", "B")
    assert state(client) == {}


def renew_all(store: Store, *renewed: str) -> Renewal:
    return store.leases.renew_all(["p", "q", "r"], renewed, "A", 30_000, 90_000)


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
    assert client.zscore("{r}:consumers", "A") == 91_000.5  # so it is known for an idle one, too


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


def test_the_next_end_behind_one_that_has_ended(store: Store, client: redis.Redis) -> None:
    """The leases of a host that went down expire one after the other."""
    seed(client, {"{q}:consumers": {"A": 1050, "B": 999, "C": 1100, "D": 1200}})
    assert renew_all(store).next_end_ms == 1100


def test_of_many_consumers_each_look_sees_others(store: Store, client: redis.Redis) -> None:
    """A hundred workers, each with hundreds of queues, cost no more than their queues."""
    queues = [f"q{n}" for n in range(200)]
    living = {f"w:{n}:{n:08}-30000": 31_000 for n in range(20)}
    with client.pipeline() as pipeline:
        for queue in queues:
            pipeline.zadd(f"{{{queue}}}:consumers", {**living, "A": 30_000})
        pipeline.zadd("{q7}:consumers", {"B": 999})
        pipeline.zadd("{q150}:consumers", {LATE: 99_000})
        pipeline.execute()
    seen: list[tuple[str, str]] = []
    for calls in range(1, 200):
        store.now = str(1000 + 7 * calls)
        client.config_resetstat()
        found = store.leases.renew_all(queues, [], "A", 30_000, 90_000)
        seen += [(other.queue, other.consumer) for other in found.others]
        assert ("q7", "B") in seen[-2:]
        stats: Any = client.info("commandstats")
        assert sum(each["calls"] for each in stats.values()) < 3 * len(queues)
        if ("q150", LATE) in seen:
            break
    assert ("q150", LATE) in seen


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
        deliver(store, leased=True, gate=gate)
        assert state(client)["{q}:consumers"] == {"A": end_ms}
        seed(client, {"q": [A]})


def test_a_lease_of_an_expiring_queue_outlasts_who_leaves(
    store: Store, client: redis.Redis
) -> None:
    ours, other = f"a:1:{'0' * 8}-300", f"b:1:{'0' * 8}-300"
    store.publish("q", [entry("a")], 1_000)
    for consumer in (ours, other):
        deliver(store, consumer, lease_ms=300, expires_ms=1_000)
    store.leases.leave("q", other)
    client.pexpire(store.keys("q").unacked(ours), 500)
    assert store.leases.renew("q", ours, 300) is not None
    assert client.pttl(store.keys("q").unacked(ours)) > 500


def test_names_that_are_no_text(store: Store) -> None:
    name = b"w@\xff:1".decode(errors="surrogateescape")
    store.publish("q", [entry("a")])
    for consumer in (name, "B"):
        deliver(store, consumer, lease_ms=500)
    assert store.leases.consumers("q") == [("B", 500, 0), (name, 500, 1)]
    store.now = "1500"
    assert store.leases.renew("q", "B", 500) == [name]
    assert store.leases.reclaim("q", name) == 1
    assert store.leases.consumers("q") == [("B", 500, 0)]


# sort_held: much at once

MUCH = 5000
ALL = [str(tag) for tag in range(MUCH)]
ENDINGS: dict[str, Callable[[Store], Any]] = {
    "reclaim": lambda store: store.leases.reclaim("q", "A"),
    "leave": lambda store: store.leases.leave("q", "A"),
}
Ending = Callable[[Store], Any]


@pytest.fixture
def much(store: Store) -> Store:
    """A holds 5,000 messages, and its lease has expired."""
    store.client.hset("{q}:unacked:A", mapping={tag: "0" + tag for tag in ALL})
    seed(store.client, {"{q}:consumers": {"A": 900}})
    return store


@pytest.fixture(params=ENDINGS)
def ending(request: pytest.FixtureRequest) -> Ending:
    return ENDINGS[request.param]


def sort_held(store: Store, cursor: Any = 0) -> bytes:
    return store.ask("sort_held", "q", "A", cursor=cursor, count=1000)


def all_sorted(store: Store) -> None:
    cursor = sort_held(store)
    while int(cursor):
        cursor = sort_held(store, cursor)


def test_much_goes_back_in_order_and_is_never_sorted_in_one_call(
    ending: Ending, much: Store, client: redis.Redis
) -> None:
    seed(client, {"q": ["last"]})
    client.config_resetstat()
    assert ending(much) in (MUCH, None)
    counts = {name: each["calls"] for name, each in client.info("commandstats").items()}
    assert counts["cmdstat_hscan"] >= 3
    # The rest is sorted in one go, which is no more than a call sorts.
    assert counts.get("cmdstat_hkeys", 0) <= 1 + 1000 // 250
    assert state(client) == {**NOW_TOKEN, "q": [*ALL, "last"]}


@pytest.mark.parametrize("gave_back", [None, 0, 1, 3])
def test_killed_half_way(
    gave_back: int | None, ending: Ending, much: Store, client: redis.Redis
) -> None:
    """The reclaiming consumer dies while it sorts, or later; another one sorts anew."""
    if gave_back is None:
        sort_held(much)
    else:
        all_sorted(much)
    for _ in range(gave_back or 0):
        assert reclaim_once(much)[0] == 250
    ending(much)
    assert state(client) == {**NOW_TOKEN, "q": ALL}


def test_two_reclaim_at_once(much: Store, client: redis.Redis) -> None:
    cursor = sort_held(much)
    all_sorted(much)
    assert reclaim_once(much) == [250, MUCH - 250]
    while int(cursor):
        cursor = sort_held(much, cursor)
        assert reclaim_once(much)[0] == 250
    assert much.leases.reclaim("q", "A") > 0
    assert state(client) == {**NOW_TOKEN, "q": ALL}


@pytest.mark.parametrize("acked", [1, 4500, 4750])
def test_consumer_that_wakes_up_in_the_middle(
    acked: int, ending: Ending, much: Store, client: redis.Redis
) -> None:
    """It is informed and can claim nothing more; tasks it finished meanwhile are not delivered."""
    seed(client, {"{q}:consumers": {"A": 9, "B": 1e9}})
    all_sorted(much)
    reclaim_once(much)
    assert much.leases.renew("q", "A", 100) is None
    for leased in (True, False):
        assert much.deliver("q", "A", 5, MUCH, lease_ms=100, leased=leased) is None
    assert much.leases.renew("q", "B", 100) == ["A"]
    ack(much, *range(acked))
    ending(much)
    assert state(client) == {**NOW_TOKEN, "q": ALL[acked:], "{q}:consumers": {"B": 1100}}


def test_much_of_which_some_is_poison(much: Store, client: redis.Redis) -> None:
    much.limits = Limits(max_deliveries=2)
    texts = {tag: returned(message(tag, headers={"id": tag}), 1) for tag in ALL if tag[-1] == "7"}
    poison = {tag: "0" + text for tag, text in texts.items()}
    client.hset("{q}:unacked:A", mapping=poison)
    assert much.leases.reclaim("q", "A") == MUCH
    after = state(client)
    assert after["q"] == [tag for tag in ALL if tag not in poison]
    assert after["{q}:dead-messages"] == poison
    assert after["{q}:dead"] == dict.fromkeys(poison, 1000)
    assert "{q}:held:A" not in after


@pytest.mark.parametrize(("seen", "tags"), [(0, [1, 2, 3, 10]), (2, [3, 10]), (9, [10]), (10, [])])
def test_recover(seen: int, tags: list[int], store: Store, client: redis.Redis) -> None:
    held = {**HELD, "10": "0" + D}
    seed(client, {"{q}:unacked:A": held})
    assert store.leases.recover("q", "A", seen) == [(tag, held[str(tag)].encode()) for tag in tags]
    assert state(client) == {"{q}:unacked:A": held}


def test_park_under_a_taken_id(store: Store, client: redis.Redis) -> None:
    """A message that is in the backlog already is not kept twice."""
    seed(client, {"{q}:unacked:A": {"1": "0" + A, "2": "0" + B}})
    store.schedule("q", [entry("a", 2000)])
    assert store.park("q", "A", [(1, "a", 2000), (2, "a", 3000)]) == 2
    after = state(client)
    assert after["{q}:messages"] == {"a": "0" + A, "a\x1f2": "0" + B}
    assert after["{q}:duplicates"] == {"a": "2"}


@pytest.mark.parametrize("gate", [None, Gate("v", ())])
def test_who_does_not_know_that_a_queue_deletes_itself_keeps_its_lease(
    gate: Gate | None, store: Store, client: redis.Redis
) -> None:
    deliver(store, expires_ms=-1, gate=gate)
    assert client.pttl("{q}:consumers") > 0
    store.publish("q", [entry("a")])
    assert deliver(store, consumer="B", gate=gate)
    assert client.pttl("{q}:consumers") == -1
