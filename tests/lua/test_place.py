"""Places of HTTP jobs at a host, each for a time, and the effect of timeouts on them."""

from __future__ import annotations

from typing import Any

import redis

from kombu_delayed.store.calls.scripts import script
from kombu_delayed.store.keys import http_host, http_host_timeouts, http_host_worker
from kombu_delayed.store.store import Store


def keys(worker: str = "w1") -> dict[str, str]:
    return {
        "places": http_host("a.example"),
        "own": http_host_worker("a.example", worker),
        "timeouts": http_host_timeouts("a.example"),
    }


def ask(
    store: Store, holder: str, now: int = 1_000, worker: str = "w1", own_limit: int = 9
) -> list[int]:
    found: list[int] = script("place")(
        store.run,
        **keys(worker),
        now=str(now),
        holder=holder,
        limit=2,
        own_limit=own_limit,
        tolerated=3,
        kept_ms=60_000,
    )
    return found


def take(store: Store, holder: str, now: int = 1_000, **more: Any) -> int:
    return ask(store, holder, now, **more)[0]


def vacate(store: Store, holder: str, timed_out: bool = False) -> int:
    given = {"holder": holder, "timed_out": int(timed_out), "kept_ms": 60_000}
    return int(script("vacate")(store.run, **keys(), **given))


def test_place(store: Store, client: redis.Redis) -> None:
    assert [take(store, "a", 1_000), take(store, "b", 2_000), take(store, "c", 3_000)] == [1, 1, 0]
    assert take(store, "a", 4_000) == 1  # its own, for longer
    assert take(store, "c", 62_000) == 1  # b's time has expired
    assert take(store, "d", 63_999) == 0
    assert take(store, "d", 64_000) == 1
    for key in (keys()["places"], keys()["own"]):
        assert client.zrange(key, 0, -1) == [b"c", b"d"]
        assert 0 < client.pttl(key) <= 60_000


def test_a_worker_has_its_own_limit(store: Store) -> None:
    assert [take(store, each, own_limit=1) for each in "ab"] == [1, 0]
    assert take(store, "b", worker="w2", own_limit=1) == 1
    assert vacate(store, "a") == 1
    assert take(store, "c", own_limit=1) == 1


def test_timeouts_in_a_row_leave_one_place(store: Store, client: redis.Redis) -> None:
    for holder in "abc":
        assert take(store, holder) == 1
        assert [vacate(store, holder, timed_out=True) for _ in range(2)] == [1, 0]  # counted once
    assert client.get(keys()["timeouts"]) == b"3"
    assert 0 < client.pttl(keys()["timeouts"]) <= 60_000
    assert [take(store, "d"), take(store, "e"), take(store, "d")] == [1, -1, 1]
    assert vacate(store, "d") == 1
    assert [take(store, "e"), take(store, "f"), take(store, "g")] == [1, 1, 0]


def test_an_answer_forgets_timeouts(store: Store, client: redis.Redis) -> None:
    for timed_out in (True, True, False, True):
        take(store, "a")
        vacate(store, "a", timed_out)
    assert client.get(keys()["timeouts"]) == b"1"


def test_how_long_the_oldest_has_lasted(store: Store) -> None:
    assert [take(store, "a", 1_000), take(store, "b", 1_090)] == [1, 1]
    assert ask(store, "c", 1_100) == [0, 100]
    assert vacate(store, "a") == 1
    assert [ask(store, "c", 1_180), ask(store, "d", 1_190)] == [[1, 0], [0, 100]]
