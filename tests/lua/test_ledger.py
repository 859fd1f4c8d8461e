"""Ledgers of jobs and HTTP requests: how long they are kept, and which calls drop them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
import redis

from celery_ext.http.service.create_once import OnceStore
from kombu_delayed.errors import ServerFull
from kombu_delayed.store.keys import job_shards
from kombu_delayed.store.ledgers import Job, LedgerStore, dealt_with
from kombu_delayed.store.store import Store
from tests.kit.claims import bodies, deliver, full
from tests.kit.state import entry, seed, state

LATER = 9_999_999_999_999
UNTIL = "{q}:ledgers-until"


def job(name: str = "j", seconds: int = 100) -> Job:
    return Job(name, "run", seconds)


def schedule(store: Store, name: str = "j", id: str = "a") -> None:
    LedgerStore(store, job(name)).schedule("q", [entry(id, LATER)])


def reschedule(store: Store) -> None:
    move, given = LedgerStore(store, job()).reschedule_call("q", [("a", f"{LATER}", "")])
    move(store.run, **given)


def restore(store: Store) -> None:
    move, given = LedgerStore(store, job()).restore_call("q", [(b"a", f"0{LATER}{{}}".encode())])
    move(store.run, **given)


def spread(store: Store) -> None:
    assert LedgerStore(store, job()).shards.count("q") == 1


MOVES: dict[str, Callable[[Store], None]] = {
    "schedule": schedule,
    "reschedule": reschedule,
    "restore": restore,
    "spread": spread,
}


def ledgers(client: redis.Redis) -> list[str]:
    return sorted(key.decode() for key in client.keys("*:job:*"))


def fill(client: redis.Redis) -> None:
    """Fill a job's own hash with as many ids as it may have, as older code would leave it."""
    client.hset("{q}:job:j", mapping={f"old{n}": 1 for n in range(512)})


def test_it_is_kept_until_its_time(store: Store, client: redis.Redis) -> None:
    for now, done in ((1_000, 0), (100_999, 1), (200_998, 1), (300_998, 0)):
        store.now = f"{now}"
        client.delete("{q}:messages", "{q}:partitions", f"{{q}}:delayed:{LATER}")
        already = LedgerStore(store, job()).schedule("q", [entry("a", LATER)]).already
        assert already == done, now
        assert state(client)[UNTIL] == {"{q}:job:j": now + 100_000}


def test_what_was_done_over_http_is_known_until_a_day_after_its_time(
    store: Store, client: redis.Redis
) -> None:
    OnceStore(store, "id", None, 50.0).schedule("q", [entry("id", "51000")])
    assert state(client)[UNTIL] == {"{q}:job:http:id": 1_000 + (50 + 86_400) * 1_000}


@pytest.mark.parametrize("move", [schedule, reschedule, restore])
def test_who_writes_the_next_one_drops_those_that_are_past(
    move: Callable[[Store], None], store: Store, client: redis.Redis
) -> None:
    for n in range(105):
        schedule(store, f"old{n:03}")
    store.now = "50000"
    schedule(store, "young")
    store.now = "101000"
    move(store)
    rest = [f"{{q}}:job:old{n}" for n in range(100, 105)]
    assert ledgers(client) == ["{q}:job:j", *rest, "{q}:job:young"]
    move(store)
    assert ledgers(client) == ["{q}:job:j", "{q}:job:young"]
    assert state(client)[UNTIL] == {"{q}:job:young": 150_000, "{q}:job:j": 201_000}


def test_consumers_drop_those_that_are_past(store: Store, client: redis.Redis) -> None:
    schedule(store)
    LedgerStore(store, job()).schedule("p", [entry("a", LATER)])
    seed(client, {f"{{{name}}}:consumers": {"A": 500_000} for name in "pqr"})
    store.now = "100999"
    store.leases.renew_all(["p", "q", "r"], ["p", "q", "r"], "A", 30_000, 30_000)
    assert ledgers(client) == ["{p}:job:j", "{q}:job:j"]
    store.now = "101000"
    store.leases.renew_all(["p", "q", "r"], ["q", "r"], "A", 30_000, 30_000)
    assert ledgers(client) == ["{p}:job:j"]
    assert not client.exists(UNTIL)


def test_who_polls_for_tasks_drops_those_that_are_past(store: Store, client: redis.Redis) -> None:
    """A topic of the HTTP API has no workers."""
    schedule(store)
    store.now = "101000"
    deliver(store, "A", want=0)
    store.leases.leave("q", "A")
    assert ledgers(client) == []


def test_an_id_is_forgotten_for_another_request_only(store: Store, client: redis.Redis) -> None:
    first, second, again = (OnceStore(store, "id", None, 0, name) for name in ("a", "b", "b"))
    assert first.schedule("q", [entry("id", 500)]).already == 0
    assert bodies(deliver(store)) == ["id"]
    assert not second.forget("q")
    assert not again.forget("q")
    assert second.schedule("q", [entry("id", 500)]).already == 0
    assert bodies(deliver(store, tag=2)) == ["id"]
    assert again.forget("q")
    assert again.schedule("q", [entry("id", 500)]).already == 1


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_one_of_older_code_lasts_when_it_is_written_to(
    move: Callable[[Store], None], store: Store, client: redis.Redis
) -> None:
    """One that older code has written to again is left to its expiry, not dropped when past."""
    client.hset("{q}:job:j", "old", 1)
    for now in (1_000, 101_000):
        client.expire("{q}:job:j", 60)
        store.now = str(now)
        schedule(store, "other", f"{now}")
        assert client.hget("{q}:job:j", "old") == b"1"
        move(store)
        assert client.hget("{q}:job:j", "old") == b"1"
        assert [client.pttl(key) for key in ("{q}:job:j", UNTIL)] == [-1, -1]
        assert state(client)[UNTIL] == dict.fromkeys(("{q}:job:j", "{q}:job:other"), now + 100_000)


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_that_of_a_queue_with_an_expiry_expires(
    move: Callable[[Store], None], store: Store, client: redis.Redis
) -> None:
    client.set("{q}:expires", 60_000)
    move(store)
    assert all(0 < client.pttl(key) <= 100_000 for key in ("{q}:job:j", UNTIL))
    LedgerStore(store, job("short", 10)).schedule("q", [entry("b", LATER)])
    assert client.pttl(UNTIL) > 50_000


def test_that_of_a_queue_that_is_declared_with_an_expiry_expires(
    store: Store, client: redis.Redis
) -> None:
    LedgerStore(store, job()).schedule("q", [entry("a", LATER)], 60_000)
    assert all(0 < client.pttl(key) <= 100_000 for key in ("{q}:job:j", UNTIL))


@pytest.mark.parametrize("move", [schedule, restore, spread])
def test_a_full_server_refuses_it_before_anything_is_done(
    move: Callable[[Store], None], store: Store, client: redis.Redis
) -> None:
    schedule(store, "old")
    store.now = "101000"
    before = state(client)
    with full(client), pytest.raises(ServerFull):
        move(store)
    assert state(client) == before


def test_a_job_keeps_the_number_of_shards(store: Store, client: redis.Redis) -> None:
    def count(shards: int, now: int) -> int:
        later = Store(client, shards=shards, now=str(now))
        return LedgerStore(later, job()).shards.count("q")

    assert [count(1, 1_000), count(3, 100_999), count(3, 300_000)] == [1, 1, 3]
    client.delete("{q}:job:j")
    client.hset(job_shards("j"), "q", 2)  # a job of older code
    assert count(1, 1_000) == 2
    client.delete(job_shards("j"))
    assert count(1, 1_000) == 2


@pytest.mark.parametrize("move", [schedule, reschedule, restore])
def test_a_large_one_is_in_slices(
    move: Callable[[Store], None], store: Store, client: redis.Redis
) -> None:
    """Each slice is dropped separately; ids in the job's own hash, as in older code, are known."""
    fill(client)
    slice = store.keys("q").job_slice("j", hashlib.sha1(b"a").hexdigest()[:3])
    schedule(store, "another")
    move(store)
    known = client.hgetall(slice)
    assert list(known) == [b"a"]
    client.delete("{q}:messages", "{q}:partitions", f"{{q}}:delayed:{LATER}")
    move(store)
    assert not client.exists("{q}:messages"), "done again"
    assert dealt_with(store, job(), "q") in (515, 516)  # with its counters
    assert state(client)[UNTIL].keys() == {"{q}:job:j", slice, "{q}:job:another"}
    assert LedgerStore(store, job()).schedule("q", [entry("old7", LATER)]).already == 1
    assert client.hgetall(slice) == known
    store.now = "101000"
    schedule(store, "next")
    assert not client.exists(slice, "{q}:job:another")


def test_slices_last_as_long_as_their_job_goes_on(store: Store, client: redis.Redis) -> None:
    """This is so however rarely a row falls into one; the next job of this name starts empty."""
    ids = [f"{n}" for n in range(40)]

    def already(*rows: str) -> int:
        client.delete("{q}:messages", "{q}:partitions", f"{{q}}:delayed:{LATER}")
        return LedgerStore(store, job()).schedule("q", [entry(id, LATER) for id in rows]).already

    fill(client)
    store.now = "1000"
    assert already(*ids) == 0
    for seconds in (90, 180, 270):
        store.now = f"{1_000 * seconds}"
        assert already(f"at {seconds}") == 0
        schedule(store, "another")
        assert already(*ids[:5]) == 5
    repaired = store.ask("repair_ledgers", "q", cursor="0", count=5_000, fixes=1)
    assert not repaired[4:]
    assert already(*ids) == 40

    store.now = "380000"
    assert already("anew") == 0
    fill(client)
    assert already(*ids) == 0
    store.now = "470000"
    assert already("at 470") == 0
    store.now = "500000"
    assert already(*ids, "at 90", "at 470") == 41


def test_slices_of_a_queue_with_an_expiry_expire_one_after_another(
    store: Store, client: redis.Redis
) -> None:
    client.set("{q}:expires", 60_000)
    fill(client)
    LedgerStore(store, job()).schedule("q", [entry(f"{n}", LATER) for n in range(200)])
    slices = {key.decode(): client.pttl(key) for key in client.keys("{q}:job-slice:*")}
    assert len(slices) > 150
    for key, ttl in slices.items():
        later = int(key.split(":")[2], 16) * 20
        assert 0 < ttl <= 100_000 + later, key
    assert max(slices.values()) - min(slices.values()) > 30_000
