"""A kill at every step: whatever was sent or answered last, messages are delivered as promised."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
import redis

from kombu_delayed.inspection import backlog
from kombu_delayed.store import caller, leases
from kombu_delayed.store import store as store_module
from kombu_delayed.store.store import Store
from tests.crash.deaths import (
    DUE_MS,
    LATER_MS,
    LEASE_MS,
    MANY,
    NOW_MS,
    Case,
    ack,
    dead_letters,
    deliver,
    every_death,
    held,
    inherit,
    publish,
    schedule,
    unacked,
)
from tests.crash.dying import Reader
from tests.kit.backlog import check_backlog
from tests.kit.state import entry

pytestmark = [pytest.mark.crash, pytest.mark.usefixtures("no_keeper")]

ETA = "1970-01-01T00:16:45+00:00"  # DUE_MS


@pytest.fixture(autouse=True)
def _small_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves of several messages take several commands."""
    for module in (caller, leases, store_module):
        monkeypatch.setattr(module, "CALL_LIMIT", 2)


def deliver_due(store: Store) -> None:
    store.now = str(DUE_MS)
    deliver(store, want=3)
    store.now = str(NOW_MS)


def held_by_the_dead(store: Store) -> None:
    """Another consumer held all and has died; what the move does comes after its lease."""
    publish(store)
    deliver(store, "dead")


def reclaim(store: Store) -> None:
    store.now = str(LATER_MS)
    store.leases.renew("q", "A", LEASE_MS)
    store.leases.reclaim("q", "dead")


def park(store: Store) -> None:
    store.park("q", "A", [(1, "0", DUE_MS), (2, "1", DUE_MS)])
    store.park("q", "A", [(3, "2", DUE_MS)])


def bury(store: Store) -> None:
    for tag in (1, 2, 3):
        store.bury("q", "A", [(tag, MANY[tag - 1], "{}", b"")])


def recover(store: Store) -> None:
    """As a consumer does whose answer was lost with its connection, before it leaves."""
    assert len(store.leases.recover("q", "A", 0)) == len(MANY)
    store.leases.leave("q", "A")


def buried(store: Store) -> None:
    """All are dead letters, and their consumer has left."""
    held(store)
    store.bury("q", "A", [(tag, id, "{}", b"") for tag, id in enumerate(MANY, 1)])
    store.leases.leave("q", "A")


def unannounced(store: Store) -> None:
    """Some are ready, the others delayed, and who was told of them has died."""
    store.publish("q", [entry(id) for id in MANY[:3]])
    store.schedule("q", [entry(id, DUE_MS) for id in MANY[3:]])
    store.client.delete("{q}:wake")


def cancel(store: Store) -> None:
    backlog.Backlog(store, "q").cancel(MANY[:5])


def reschedule(store: Store) -> None:
    """Some are made ready, the others wait longer."""
    times = (NOW_MS if n % 3 == 0 else DUE_MS + n for n in range(len(MANY)))
    moves = [backlog.Move(id, str(at)) for id, at in zip(MANY, times, strict=True)]
    backlog.Backlog(store, "q").reschedule(moves)


CASES = {
    "publish": Case(publish, publishes=True),
    "schedule": Case(schedule, publishes=True),
    "deliver": Case(lambda store: deliver(store, want=3) and None, publish),
    "deliver what is due": Case(deliver_due, schedule),
    "ack": Case(lambda store: [ack(store, tag) for tag in (1, 2, 3)] and None, held),
    "release": Case(lambda store: store.release("q", "A", range(1, 6)) and None, held),
    "reclaim": Case(reclaim, held_by_the_dead),
    "park": Case(park, held),
    "bury": Case(bury, held),
    "leave": Case(lambda store: store.leases.leave("q", "A"), held),
    "recover": Case(recover, held),
    "cancel": Case(cancel, schedule),
    "reschedule": Case(reschedule, schedule),
    "replay": Case(lambda store: store.dead.replay("q", MANY[:5]) and None, buried),
    "replay later": Case(lambda store: store.dead.replay("q", MANY[:5], DUE_MS) and None, buried),
    "announce": Case(lambda store: store.claimable.announce("q"), unannounced),
}
ACKS = {
    "ack": CASES["ack"],
    "ack with events": replace(CASES["ack"], event_limit=1000),
}


FORGETTING = ("ack", "cancel")
HOLDING = [name for name, case in CASES.items() if not case.publishes and name not in FORGETTING]


@pytest.mark.parametrize("name", HOLDING)
def test_each_message_is_delivered_once_more(name: str, client: redis.Redis) -> None:
    for death in every_death(client, CASES[name]):
        found = inherit(client) + dead_letters(client)
        assert found == Counter(MANY), f"{name} at {death}"


@pytest.mark.parametrize("name", HOLDING)
def test_nothing_is_left_behind(name: str, client: redis.Redis) -> None:
    for death in every_death(client, CASES[name]):
        inherit(client)
        left = {key.decode() for key in client.keys("*")} - {"{q}:wake", "{q}:moved"}  # hints
        left -= {"{q}:dead", "{q}:dead-messages", "{q}:dead-reasons"}
        assert left == {"{q}:consumers"}, f"{name} at {death}"
        assert client.zrange("{q}:consumers", 0, -1) == [b"B"], f"{name} at {death}"


@pytest.mark.parametrize("name", ACKS)
def test_acked_never_comes_back(name: str, client: redis.Redis) -> None:
    acked = set()
    for death in every_death(client, ACKS[name]):
        gone = set(MANY) - set(unacked(client))
        acked.add(len(gone))
        assert inherit(client) == Counter(set(MANY) - gone), f"{name} at {death}"
    assert acked - {0} == {1, 2, 3}


def test_cancelled_never_comes_back(client: redis.Redis) -> None:
    cancelled = set()
    for death in every_death(client, CASES["cancel"]):
        left = check_backlog(client)
        cancelled.add(len(MANY) - len(left))
        assert inherit(client) == Counter(left.keys()), f"cancel at {death}"
    assert cancelled == {0, 2, 4, 5}


def test_rescheduled_is_not_early(client: redis.Redis) -> None:
    moved = set()
    for death in every_death(client, CASES["reschedule"]):
        later = {id for id, at_ms in check_backlog(client).items() if at_ms > DUE_MS}
        moved.add(len(later))
        assert set(inherit(client, now_ms=DUE_MS)) == set(MANY) - later, f"at {death}"
    assert moved == {0, 1, 2, 4}


def test_replayed_later_is_not_early(client: redis.Redis) -> None:
    replayed = set()
    for death in every_death(client, CASES["replay later"]):
        later = set(check_backlog(client))
        replayed.add(len(later))
        assert set(MANY) - later == set(dead_letters(client)), f"at {death}"
        names = {id.decode() for id in client.zrange("{q}:dead", 0, -1)}
        assert set(MANY) - later == names, f"at {death}"
        assert inherit(client, now_ms=DUE_MS - 1) == Counter(), f"at {death}"
    assert replayed == {0, 2, 4, 5}


def test_announced_or_not_and_then_announced_again(client: redis.Redis) -> None:
    tokens = {b"now": 0.0, b"due": float(DUE_MS)}
    found = []
    for death in every_death(client, CASES["announce"]):
        found.append(dict(client.zrange("{q}:wake", 0, -1, withscores=True)))
        Store(client, now=str(NOW_MS)).claimable.announce("q")
        assert dict(client.zrange("{q}:wake", 0, -1, withscores=True)) == tokens, f"at {death}"
    assert found == [{}, {}, tokens, tokens]  # the first command is answered NOSCRIPT


def test_parked_is_not_early(client: redis.Redis) -> None:
    for death in every_death(client, CASES["park"]):
        parked = {id.decode() for id in client.hkeys("{q}:messages")}
        assert set(inherit(client, now_ms=DUE_MS - 1)).isdisjoint(parked), f"park at {death}"


def test_unread_answer_of_a_schedule_that_is_sent_again(client: redis.Redis) -> None:
    """The producer's successor, or its retry, sends all: each is delivered once."""
    for death in every_death(client, CASES["schedule"]):
        schedule(Store(client, now=str(NOW_MS)))
        assert inherit(client) == Counter(MANY), f"schedule at {death}"


def test_unread_answer_of_a_publish_that_is_sent_again(client: redis.Redis) -> None:
    """At least once: a list does not know its members, so what had arrived is there twice."""
    for death in every_death(client, CASES["publish"]):
        arrived = Counter(json.loads(text)["body"] for text in client.lrange("q", 0, -1))
        publish(Store(client, now=str(NOW_MS)))
        assert inherit(client) == arrived + Counter(MANY), f"publish at {death}"


def test_published_and_died_is_delivered_once(client: redis.Redis) -> None:
    for name in ("publish", "schedule"):
        for at, cut in every_death(client, CASES[name]):
            found = inherit(client)
            assert set(found.values()) <= {1}, f"{name} at {at}, {cut}"
            assert list(found) == MANY[: len(found)], f"{name} at {at}, {cut}"


# A whole consumer: what it does from its first claim to its end.


def life(store: Store) -> None:
    """Takes all, then acks, puts back, buries; parks what is not due; closes."""
    reader = Reader(store)
    try:
        reader.read()
        reader.qos.ack(reader.take())
        reader.qos.reject(reader.take(), requeue=True)
        reader.qos.reject(reader.take())
        reader.read()
        reader.qos.ack(reader.take())
        reader.read()
        reader.consumer.close()
    finally:
        reader.consumer.lease.end()


def mixed(store: Store) -> None:
    """Five messages that are ready, and one from a producer that knows no backlog."""
    store.publish("q", [entry(id) for id in MANY[:5]])
    early = json.dumps({"body": "early", "headers": {"eta": ETA, "id": "early"}, "properties": {}})
    store.client.lpush("q", early)


LIFE = Case(life, mixed)
BODIES = Counter([*MANY[:5], "early"])


def test_a_consumer_that_dies_at_any_command(client: redis.Redis) -> None:
    outcomes = set()
    for at, cut in every_death(client, LIFE):
        found = inherit(client) + dead_letters(client)
        gone = BODIES - found
        assert found <= BODIES, f"twice, at {at}, {cut}: {found - BODIES}"
        assert gone in (Counter(), Counter(["0"]), Counter(["0", "3"])), (
            f"lost, at {at}, {cut}: {gone}"
        )
        outcomes.add(len(gone))
    assert outcomes == {0, 1, 2}


def test_a_second_consumer_that_dies_while_it_takes_over(client: redis.Redis) -> None:
    """Reclaimed by one that dies as well: the third is delivered all, each once."""

    def first_dies(store: Store) -> None:
        publish(store)
        deliver(store, "first")

    def take_over(store: Store) -> None:
        store.now = str(LATER_MS)
        deliver(store, "second", 0)
        for dead in store.leases.renew("q", "second", LEASE_MS) or []:
            store.leases.reclaim("q", dead)
        deliver(store, "second")

    for death in every_death(client, Case(take_over, first_dies)):
        assert inherit(client, "third") == Counter(MANY), f"at {death}"
