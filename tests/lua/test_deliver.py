from __future__ import annotations

from typing import Any

import pytest
import redis

from kombu_delayed.store.keys import SEPARATOR
from kombu_delayed.store.store import Delivered, Store
from tests.kit.state import entry, message, promoted, seed, state

A, B, C, D = (message(body) for body in "abcd")
LEASE = {"{q}:consumers": {"A": 31_000}}


@pytest.fixture(autouse=True)
def _time_stands_still(store: Store) -> None:
    store.now = "1000"


def deliver(
    store: Store, consumer: str = "A", want: int = 10, tag: int = 1, **options: Any
) -> Delivered:
    answer = store.deliver("q", consumer, want, tag, **{"lease_ms": 30_000, **options})
    assert answer is not None
    return answer


def records(answer: Delivered) -> list[str]:
    return [record.decode() for record in answer.records]


def bodies(answer: Delivered) -> str:
    return "".join(text.split('"body":"')[1][0] for text in records(answer))


# Ready messages.


def test_nothing(store: Store, client: redis.Redis) -> None:
    assert deliver(store) == Delivered(1000, 0, False, 1, [])
    assert state(client) == LEASE


def test_ready_messages_move_to_unacked(store: Store, client: redis.Redis) -> None:
    seed(client, {"q": [A, B, C], "{q}:wake": {"now": 0}})
    assert deliver(store, want=2, tag=7) == Delivered(
        1000, 0, True, 1, [f"0{A}".encode(), f"0{B}".encode()]
    )
    assert state(client) == {
        **LEASE,
        "q": [C],
        "{q}:unacked:A": {"7": "0" + A, "8": "0" + B},
        "{q}:wake": {"now": 0},
    }


def test_last_message_takes_the_token_along(store: Store, client: redis.Redis) -> None:
    seed(client, {"q": [A], "{q}:wake": {"now": 0}})
    assert deliver(store, want=1) == Delivered(1000, 0, False, 1, [f"0{A}".encode()])
    assert state(client) == {**LEASE, "{q}:unacked:A": {"1": "0" + A}}


def test_the_last_one_that_was_delayed_takes_its_token_along(
    store: Store, client: redis.Redis
) -> None:
    """Nobody has taken it before: it would wake somebody in vain, and stay in an empty queue."""
    store.schedule("q", [entry("x", 2000)])
    assert state(client)["{q}:wake"] == {"due": 2000}
    store.now = "3000"
    assert bodies(deliver(store)) == "x"
    assert "{q}:wake" not in state(client)


@pytest.mark.parametrize("wake", [{}, {"{q}:wake": {"now": 0}}])
def test_more_puts_a_token(wake: dict[str, Any], store: Store, client: redis.Redis) -> None:
    seed(client, {"q": [A, B], **wake})
    assert deliver(store, want=1).more
    assert state(client)["{q}:wake"] == {"now": 0}


def test_priorities(store: Store, client: redis.Redis) -> None:
    low, mid = "q" + SEPARATOR + "9", "q" + SEPARATOR + "3"
    seed(client, {low: [A], mid: [B, C], "q": [D]})
    answer = deliver(store, want=3)
    assert records(answer) == ["0" + D, "3" + B, "3" + C]
    assert answer.more
    assert state(client) == {
        **LEASE,
        low: [A],
        "{q}:unacked:A": {"1": "0" + D, "2": "3" + B, "3": "3" + C},
        "{q}:wake": {"now": 0},
    }
    assert records(deliver(store, want=3, tag=4)) == ["9" + A]


@pytest.mark.parametrize("want", [0, 1, 2, 3])
def test_more_is_seen_in_every_list(want: int, store: Store, client: redis.Redis) -> None:
    seed(client, {"q": [A], "q" + SEPARATOR + "6": [B]})
    answer = deliver(store, want=want)
    assert bodies(answer) == "ab"[:want]
    assert answer.more is (want < 2)


def test_want_nothing_takes_nothing(store: Store, client: redis.Redis) -> None:
    seed(client, {"q": [A]})
    assert deliver(store, want=0) == Delivered(1000, 0, True, 1, [])
    assert state(client) == {**LEASE, "q": [A], "{q}:wake": {"now": 0}}


@pytest.mark.parametrize("want", [250, 1000, 3999, 4000, 8000, 10_000])
def test_any_number_of_messages_is_recorded(want: int, store: Store, client: redis.Redis) -> None:
    client.rpush("q", *[A] * 10_000)
    assert len(deliver(store, want=want).records) == want
    assert client.hlen("{q}:unacked:A") == want
    assert client.llen("q") == 10_000 - want


def test_stock_messages_and_steps_of_other_transports(store: Store, client: redis.Redis) -> None:
    seed(client, {"q": ["not JSON", "{}", ""]})
    assert records(deliver(store)) == ["0not JSON", "0{}", "0"]


# Promotion.


def test_promotion(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("a", 2000), entry("b", 3000)])
    store.now = "2500"
    answer = deliver(store)
    assert answer == Delivered(2500, 3000, False, 1, [f"0{promoted(A, 2000)}".encode()])
    assert state(client) == {
        "{q}:partitions": {"2000": 2000},
        "{q}:delayed:2000": {"b": 3000},
        "{q}:messages": {"b": "0" + B},
        "{q}:consumers": {"A": 32_500},
        "{q}:unacked:A": {"1": "0" + promoted(A, 2000)},
        "{q}:armed": "3000 A",
        "{q}:wake": {"due": 2000},
    }


@pytest.mark.parametrize(("now", "count"), [("1999", 0), ("2000", 1), ("2001", 1)])
def test_never_early(now: str, count: int, store: Store) -> None:
    store.schedule("q", [entry("a", 2000)])
    store.now = now
    assert len(deliver(store).records) == count


def test_promoted_in_order_of_due_times(store: Store) -> None:
    dues = {"a": 2004, "b": 2001, "c": 2003, "d": 2002}
    store.schedule("q", [entry(id, due) for id, due in dues.items()])
    store.now = "3000"
    assert bodies(deliver(store)) == "bdca"


def test_promoted_behind_what_was_ready(store: Store, client: redis.Redis) -> None:
    seed(client, {"q": [A]})
    store.schedule("q", [entry("b", 2000)])
    store.now = "3000"
    assert bodies(deliver(store)) == "ab"


def test_promoted_by_priority(store: Store) -> None:
    store.schedule("q", [entry("a", 2000, 9), entry("b", 2001, 3), entry("c", 2002)])
    store.now = "3000"
    answer = deliver(store)
    assert records(answer) == [
        "0" + promoted(C, 2002),
        "3" + promoted(B, 2001),
        "9" + promoted(A, 2000),
    ]


@pytest.mark.parametrize("damaged", ["", "0", "02000no JSON", "no JSON", "0{}"])
def test_what_was_damaged_stops_no_other(damaged: str, store: Store, client: redis.Redis) -> None:
    """A consumer gets it, and buries what it cannot read."""
    store.now = "1000"
    store.schedule("q", [entry(id, 2000) for id in "abc"])
    client.hset("{q}:messages", "b", damaged)
    store.now = "2000"
    answer = store.deliver("q", "A", 9, 1, lease_ms=100)
    assert answer is not None
    assert len(answer.records) == 3
    texts = [record[1:].decode() for record in answer.records]
    assert {promoted(message("a"), 2000), promoted(message("c"), 2000)} < set(texts)
    assert store.size("q").delayed == 0


def test_promotion_empties_the_backlog(client: redis.Redis) -> None:
    store = Store(client, partition_size=3, now="1000")
    store.schedule("q", [entry(str(n), 2000 + n) for n in range(20)])
    store.now = "3000"
    assert len(deliver(store, want=20).records) == 20
    assert set(state(client)) == {"{q}:consumers", "{q}:unacked:A"}


@pytest.mark.parametrize(("promotions", "size"), [(1, 128), (3, 128), (3, 2), (5, 4)])
def test_promotions_are_bounded(promotions: int, size: int, client: redis.Redis) -> None:
    store = Store(client, partition_size=size, now="1000")
    store.schedule("q", [entry(str(n), 2000 + n) for n in range(10)])
    store.now = "3000"
    seen = []
    for call in range(1, 12):
        answer = deliver(store, want=10, tag=call * 10, promotions=promotions)
        seen += answer.records
        left = 10 - min(call * promotions, 10)
        assert store.size("q").due == left
        assert answer.more is (left > 0)
        assert ("now" in state(client).get("{q}:wake", {})) is (left > 0)
        if not left:
            break
    assert len(seen) == 10


def test_promoted_but_not_wanted_stays_ready(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("a", 2000), entry("b", 2001)])
    store.now = "3000"
    answer = deliver(store, want=1)
    assert answer.more
    after = state(client)
    assert after["q"] == [promoted(B, 2001)]
    assert after["{q}:unacked:A"] == {"1": "0" + promoted(A, 2000)}


def test_member_without_its_message_is_passed_over(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("a", 2000), entry("b", 2001)])
    client.hdel("{q}:messages", "a")
    store.now = "3000"
    assert bodies(deliver(store)) == "b"
    assert "{q}:partitions" not in state(client)


# Lease.


def test_lease_is_renewed(store: Store, client: redis.Redis) -> None:
    deliver(store)
    store.now = "5000"
    assert deliver(store, leased=True).now_ms == 5000
    assert state(client)["{q}:consumers"] == {"A": 35_000}


def test_lost_lease_takes_nothing(store: Store, client: redis.Redis) -> None:
    before = {"q": [A], "{q}:wake": {"now": 0}, "{q}:consumers": {"B": 9000}}
    seed(client, before)
    assert store.deliver("q", "A", 1, 1, lease_ms=30_000, leased=True) is None
    assert state(client) == before


def test_lease_that_ended_unnoticed_goes_on(store: Store) -> None:
    deliver(store, lease_ms=500)
    store.now = "9000"
    assert deliver(store, leased=True).now_ms == 9000


def test_consumers_are_counted(store: Store) -> None:
    assert [deliver(store, name).consumers for name in ("A", "B", "A")] == [1, 2, 2]


def test_without_lease_nothing_stays(store: Store, client: redis.Redis) -> None:
    seed(client, {"q": [A]})
    assert deliver(store, lease_ms=0) == Delivered(1000, 0, False, 0, [f"0{A}".encode()])
    assert state(client) == {}


# The promise to claim at the next due time.


def test_first_caller_is_armed(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("a", 2000)])
    assert deliver(store, "A").next_due_ms == 2000
    assert state(client)["{q}:armed"] == "2000 A"


def established(store: Store, *names: str) -> None:
    """Let consumers ask for nothing: they have a lease from then on, and no promise."""
    for name in names:
        deliver(store, name, want=0, waits=False)


def test_second_consumer_is_not_armed(store: Store, client: redis.Redis) -> None:
    established(store, "B")
    store.schedule("q", [entry("a", 2000)])
    deliver(store, "A")
    assert deliver(store, "B", leased=True).next_due_ms == 0
    assert state(client)["{q}:armed"] == "2000 A"


def test_holder_is_told_again(store: Store) -> None:
    store.schedule("q", [entry("a", 2000)])
    assert [deliver(store, "A").next_due_ms for _ in range(3)] == [2000] * 3


def test_holder_is_told_of_a_later_time(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("a", 2000), entry("b", 3000)])
    deliver(store, "A")
    store.now = "2000"
    assert deliver(store, "A").next_due_ms == 3000
    assert state(client)["{q}:armed"] == "3000 A"


@pytest.mark.parametrize(("now", "told"), [("1999", 0), ("2000", 3000), ("5000", 0)])
def test_overdue_promise_is_taken_over(now: str, told: int, store: Store) -> None:
    store.schedule("q", [entry("a", 2000), entry("b", 3000)])
    established(store, "B")
    deliver(store, "A")
    store.now = now
    assert deliver(store, "B", want=0, leased=True).next_due_ms == told


def test_promise_later_than_the_next_due_time_is_taken_over(
    store: Store, client: redis.Redis
) -> None:
    store.schedule("q", [entry("a", 3000)])
    established(store, "B")
    deliver(store, "A")
    store.schedule("q", [entry("b", 2000)])
    assert deliver(store, "B", leased=True).next_due_ms == 2000
    assert state(client)["{q}:armed"] == "2000 B"
    assert deliver(store, "A", leased=True).next_due_ms == 0


def test_promise_earlier_than_the_next_due_time_is_kept(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("b", 3000)])
    seed(client, {"{q}:armed": "2000 A"})
    established(store, "B")
    assert deliver(store, "B", leased=True).next_due_ms == 0
    assert state(client)["{q}:armed"] == "2000 A"


def test_promise_ends_with_the_backlog(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("a", 2000)])
    deliver(store, "A")
    store.now = "2000"
    assert deliver(store, "A").next_due_ms == 0
    assert "{q}:armed" not in state(client)


def test_promise_of_another_stays_his(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("a", 2000)])
    deliver(store, "A")
    store.now = "2000"
    assert bodies(deliver(store, "B")) == "a"
    assert state(client)["{q}:armed"] == "2000 A"
    deliver(store, "A")
    assert "{q}:armed" not in state(client)


def test_who_does_not_wait_is_never_armed(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("a", 2000)])
    assert deliver(store, "A", waits=False).next_due_ms == 0
    assert "{q}:armed" not in state(client)
    deliver(store, "B")
    assert deliver(store, "A", waits=False).next_due_ms == 0
    assert state(client)["{q}:armed"] == "2000 B"


def test_names_with_blanks_hold_promises(store: Store) -> None:
    names = ("host a:1", "host", "a:1")
    store.schedule("q", [entry("a", 2000)])
    established(store, *names)
    for name in names:
        told = deliver(store, name, leased=True).next_due_ms
        assert told == (2000 if name == "host a:1" else 0)
    assert deliver(store, "host a:1", leased=True).next_due_ms == 2000


def test_token_for_what_was_due_stays_for_another(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("a", 2000)])
    deliver(store, "A")
    assert state(client)["{q}:wake"] == {"due": 2000}


# The promise goes round.

TWO = {"A": 9000, "B": 9000}


@pytest.mark.parametrize(
    ("before", "call", "after"),
    [
        pytest.param(
            {"armed": "2000 A", "consumers": TWO, "q": [A]},
            {"leased": True},
            {"wake": {"due": 2000}},
            id="who got messages passes it on",
        ),
        pytest.param(
            {"consumers": TWO, "q": [A]},
            {"leased": True},
            {"wake": {"due": 2000}},
            id="who got messages takes none",
        ),
        pytest.param(
            {"armed": "2500 B", "consumers": TWO, "q": [A]},
            {"leased": True},
            {"wake": {"due": 2000}},
            id="who got messages takes none that is too late either",
        ),
        pytest.param(
            {"armed": "2000 A", "consumers": TWO, "q": [A], "wake": {"due": 1500}},
            {"leased": True},
            {"wake": {"due": 1500}},
            id="a token is not put off",
        ),
        pytest.param(
            {"armed": "2000 A", "consumers": TWO, "q": [A, B]},
            {"leased": True, "want": 1},
            {"wake": {"due": 2000, "now": 0}, "q": [B]},
            id="there is more",
        ),
        pytest.param(
            {"armed": "2000 A", "consumers": {"A": 9000}, "q": [A]},
            {"leased": True},
            {"armed": "2000 A", "told": 2000},
            id="alone",
        ),
        pytest.param(
            {"armed": "2000 A", "consumers": TWO},
            {"leased": True},
            {"armed": "2000 A", "told": 2000},
            id="who got nothing keeps it",
        ),
        pytest.param(
            {"armed": "2000 A", "consumers": TWO, "q": [A]},
            {"leased": True, "want": 0},
            {"armed": "2000 A", "told": 2000, "wake": {"now": 0}, "q": [A]},
            id="who wants nothing keeps it",
        ),
        pytest.param(
            {"armed": "2000 B", "consumers": TWO, "q": [A]},
            {"leased": True},
            {"armed": "2000 B"},
            id="another's stays",
        ),
        pytest.param(
            {"armed": "2000 A", "consumers": TWO, "q": [A]},
            {"leased": True, "waits": False},
            {"armed": "2000 A"},
            id="who does not wait leaves it",
        ),
        pytest.param(
            {"armed": "2000 B", "consumers": {"B": 9000}},
            {},
            {"armed": "2000 A", "told": 2000},
            id="a newcomer takes it over",
        ),
        pytest.param(
            {"armed": "1500 B", "consumers": {"B": 9000}},
            {},
            {"armed": "2000 A", "told": 2000},
            id="a newcomer takes one over that is too early",
        ),
        pytest.param(
            {"armed": "2000 B", "consumers": {"B": 9000}, "q": [A]},
            {},
            {"wake": {"due": 2000}},
            id="a newcomer that got messages passes it on",
        ),
        pytest.param(
            {"armed": "2000 B", "consumers": {"B": 9000}},
            {"waits": False},
            {"armed": "2000 B"},
            id="a newcomer that does not wait leaves it",
        ),
        pytest.param(
            {"armed": "2000 B", "consumers": {"B": 9000}},
            {"lease_ms": 0},
            {"armed": "2000 B"},
            id="who takes for good is no newcomer",
        ),
    ],
)
def test_promise_goes_round(
    before: dict[str, Any],
    call: dict[str, Any],
    after: dict[str, Any],
    store: Store,
    client: redis.Redis,
) -> None:
    def keys(given: dict[str, Any]) -> dict[str, Any]:
        return {key if key == "q" else f"{{q}}:{key}": value for key, value in given.items()}

    store.schedule("q", [entry("d", 2000)])
    client.delete("{q}:wake")
    seed(client, keys(before))
    after = dict(after)
    assert deliver(store, **call).next_due_ms == after.pop("told", 0)
    found = state(client)
    assert {key: found.get(key) for key in keys(dict.fromkeys(("armed", "wake", "q")))} == {
        **keys(dict.fromkeys(("armed", "wake", "q"))),
        **keys(after),
    }


def test_promise_passed_on_reaches_who_waits(store: Store, client: redis.Redis) -> None:
    store.schedule("q", [entry("a", 2000), entry("b", 2001), entry("c", 2002)])
    established(store, "A", "B")
    client.delete("{q}:wake")
    assert deliver(store, "A", leased=True).next_due_ms == 2000
    for now, name in ((2000, "A"), (2001, "B"), (2002, "A")):
        store.now = str(now)
        assert len(deliver(store, name, tag=now, leased=True).records) == 1
        assert "{q}:armed" not in state(client)
        assert client.zpopmin("{q}:wake") == ([(b"due", now + 1.0)] if now < 2002 else [])


# Expiry of the queue.


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


def test_leases_that_older_workers_renew_do_not_expire(store: Store, client: redis.Redis) -> None:
    seed(client, {"q": [A, B]})
    deliver(store, "A-30000", want=1, expires_ms=60_000)
    deliver(store, "B", want=1, expires_ms=60_000)
    assert client.pttl("{q}:consumers") == -1


def test_who_takes_for_good_lets_no_lease_expire(store: Store, client: redis.Redis) -> None:
    seed(client, {"q": [A, B]})
    deliver(store, "A-30000", want=1)
    deliver(store, "B-0", want=1, lease_ms=0, expires_ms=1_000)
    assert client.pttl("{q}:consumers") == -1


def test_without_expiry_lists_stay(store: Store, client: redis.Redis) -> None:
    seed(client, {"q": [A, B]})
    deliver(store, want=1)
    assert client.pttl("q") == -1
