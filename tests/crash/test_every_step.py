"""A kill at every step, after any command or answer: messages are delivered as promised."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import redis

from kombu_delayed.inspection import backlog
from kombu_delayed.store.store import Store
from tests.crash.deaths import (
    DUE_MS,
    LATER_MS,
    LEASE_MS,
    MANY,
    NOW_MS,
    Case,
    ack,
    buried,
    bury,
    dead_letters,
    deliver,
    every_death,
    held,
    inherit,
    park,
    publish,
    schedule,
    unacked,
)
from tests.crash.dying import Reader
from tests.kit.backlog import check_backlog
from tests.kit.state import all_keys, entry

pytestmark = [pytest.mark.crash, pytest.mark.usefixtures("no_keeper", "small_calls")]

ETA = "1970-01-01T00:16:45+00:00"  # DUE_MS


def deliver_due(store: Store) -> None:
    store.now = str(DUE_MS)
    deliver(store, want=3)
    store.now = str(NOW_MS)


def held_by_the_dead(store: Store) -> None:
    """Another consumer held all and has died; the move comes after its lease has expired."""
    publish(store)
    deliver(store, "dead")


def reclaim(store: Store) -> None:
    store.now = str(LATER_MS)
    store.leases.renew("q", "A", LEASE_MS)
    store.leases.reclaim("q", "dead")


def recover(store: Store) -> None:
    """Recovers as a consumer does that lost an answer with its connection, before it leaves."""
    assert len(store.leases.recover("q", "A", 0)) == len(MANY)
    store.leases.leave("q", "A")


def unannounced(store: Store) -> None:
    """Some are ready, the others delayed, and the consumer that was woken for them has died."""
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
    "ack": Case(lambda store: ack(store, 1, 2, 3), held),
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
FORGETTING = ("ack", "cancel")
HOLDING = [name for name, case in CASES.items() if not case.publishes and name not in FORGETTING]


@pytest.mark.parametrize("name", HOLDING)
def test_each_message_is_delivered_once_more_and_nothing_is_left(
    name: str, client: redis.Redis
) -> None:
    for death in every_death(client, CASES[name]):
        found = inherit(client) + dead_letters(client)
        assert found == Counter(MANY), f"{name} at {death}"
        left = {*all_keys(client)} - {"{q}:wake"}
        left -= {"{q}:dead", "{q}:dead-messages", "{q}:dead-reasons"}
        assert left == {"{q}:consumers"}, f"{name} at {death}"
        assert client.zrange("{q}:consumers", 0, -1) == [b"B"], f"{name} at {death}"


@pytest.mark.parametrize(
    ("name", "event_limit", "counts"),
    [("ack", 0, {1, 2, 3}), ("ack", 1000, {1, 2, 3}), ("cancel", 0, {2, 4, 5})],
)
def test_acked_or_cancelled_never_comes_back(
    name: str, event_limit: int, counts: set[int], client: redis.Redis
) -> None:
    gone = set()
    for death in every_death(client, replace(CASES[name], event_limit=event_limit)):
        left = {*unacked(client), *check_backlog(client)}
        gone.add(len(MANY) - len(left))
        assert inherit(client) == Counter(left), f"{name} at {death}"
    assert gone - {0} == counts


@pytest.mark.parametrize(
    ("name", "now_ms", "counts"),
    [
        ("reschedule", DUE_MS, {0, 1, 2, 4}),
        ("replay later", DUE_MS - 1, {0, 2, 4, 5}),
        ("park", DUE_MS - 1, {0, 2, 3}),
    ],
)
def test_what_waits_is_not_early(
    name: str, now_ms: int, counts: set[int], client: redis.Redis
) -> None:
    found = set()
    for death in every_death(client, CASES[name]):
        later = {id for id, at_ms in check_backlog(client).items() if at_ms > now_ms}
        found.add(len(later))
        assert dead_letters(client).keys() == {
            id.decode() for id in client.zrange("{q}:dead", 0, -1)
        }, f"{name} at {death}"
        others = {*inherit(client, now_ms=now_ms), *dead_letters(client), *unacked(client)}
        assert others == set(MANY) - later, f"{name} at {death}"
    assert found == counts


def test_announced_or_not_and_then_announced_again(client: redis.Redis) -> None:
    tokens = {b"now": 0.0, b"due": float(DUE_MS)}
    found = []
    for death in every_death(client, CASES["announce"]):
        found.append(dict(client.zrange("{q}:wake", 0, -1, withscores=True)))
        Store(client, now=str(NOW_MS)).claimable.announce("q")
        assert dict(client.zrange("{q}:wake", 0, -1, withscores=True)) == tokens, f"at {death}"
    assert found == [{}, {}, tokens, tokens]  # the first command is answered NOSCRIPT


@pytest.mark.parametrize("name", ["publish", "schedule"])
def test_sent_again_by_a_successor_or_a_retry(name: str, client: redis.Redis) -> None:
    """At least once: a list does not know its members, so a message that had arrived is doubled."""
    for death in every_death(client, CASES[name]):
        arrived = Counter(json.loads(text)["body"] for text in client.lrange("q", 0, -1))
        CASES[name].move(Store(client, now=str(NOW_MS)))
        assert inherit(client) == arrived + Counter(MANY), f"{name} at {death}"


@pytest.mark.parametrize("name", ["publish", "schedule"])
def test_published_and_died_is_delivered_once(name: str, client: redis.Redis) -> None:
    for death in every_death(client, CASES[name]):
        found = inherit(client)
        assert set(found.values()) <= {1}, f"{name} at {death}"
        assert list(found) == MANY[: len(found)], f"{name} at {death}"


# A whole consumer, from its first claim to its end.


def life(store: Store, polls: bool = False) -> None:
    """Takes all, then acks, puts back, buries; parks what is not due; closes."""
    reader = Reader(store, polls=polls)
    try:
        reader.read()
        reader.qos.ack(reader.take())
        reader.qos.reject(reader.take(), requeue=True)
        reader.qos.reject(reader.take())
        reader.read()
        reader.qos.ack(reader.take())
        reader.qos.reject(reader.take(), requeue=True)
        reader.read()  # the server surely has all scripts: this claim is not waited for
        reader.consumer.close()
    finally:
        reader.consumer.lease.end()


def mixed(store: Store) -> None:
    """Five messages that are ready, and one from a producer that knows no backlog."""
    store.publish("q", [entry(id) for id in MANY[:5]])
    early = json.dumps({"body": "early", "headers": {"eta": ETA, "id": "early"}, "properties": {}})
    store.client.lpush("q", early)


BODIES = Counter([*MANY[:5], "early"])


@pytest.mark.parametrize("polls", [False, True])
def test_a_consumer_that_dies_at_any_command(client: redis.Redis, polls: bool) -> None:
    outcomes = set()
    for at, cut in every_death(client, Case(partial(life, polls=polls), mixed)):
        found = inherit(client) + dead_letters(client)
        gone = BODIES - found
        assert found <= BODIES, f"twice, at {at}, {cut}: {found - BODIES}"
        assert gone in (Counter(), Counter(["0"]), Counter(["0", "3"])), (
            f"lost, at {at}, {cut}: {gone}"
        )
        outcomes.add(len(gone))
    assert outcomes == {0, 1, 2}


def test_a_second_consumer_that_dies_while_it_takes_over(client: redis.Redis) -> None:
    """Reclaimed by one that dies as well: the third gets all messages, each once."""

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
