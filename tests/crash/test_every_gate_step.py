"""A kill at every step of a gate's moves: nothing waits forever, no slot stays with the dead."""

from __future__ import annotations

import pytest
import redis

from kombu_delayed.inspection.gate_usage import slots_in_use
from kombu_delayed.message.ticket import Gate, LimitNumbers, Ticket, Use, put_ticket
from kombu_delayed.store.store import Entry, Store
from tests.crash.deaths import (
    DUE_MS,
    LATER_MS,
    LEASE_MS,
    MANY,
    Case,
    ack,
    every_death,
    publish,
)
from tests.kit.state import entry

pytestmark = [pytest.mark.crash, pytest.mark.usefixtures("no_keeper", "small_calls")]

GATE = Gate("v", (LimitNumbers("all", 2),))
OTHER = Gate("w", (LimitNumbers("all", 3),))


def ticket(id: str, gate: Gate = GATE) -> str:
    return Ticket(uses=(Use("all"),)).text(gate.version, id)


def with_tickets(store: Store, due_ms: int = 0) -> None:
    plain = [entry(id, due_ms) if due_ms else entry(id) for id in MANY]
    sent = [Entry(e.id, e.step, put_ticket(e.message, ticket(e.id)), e.due) for e in plain]
    if due_ms:
        store.schedule("q", sent)
    else:
        store.publish("q", sent)


def claim(store: Store, consumer: str, tag: int, gate: Gate = GATE) -> list[str]:
    """Returns the ids that may run; messages without tickets wait for their turn from now on."""
    answer = store.deliver("q", consumer, 4, tag, lease_ms=LEASE_MS, gate=gate)
    assert answer is not None
    records = list(enumerate(answer.records, tag))
    bare = [(n, _id(record)) for n, record in records if not gate.has_ticket(record)]
    if bare:
        store.admit("q", consumer, [(n, ticket(id, gate), b"") for n, id in bare], gate)
    return [_id(record) for n, record in records if (n, _id(record)) not in bare]


def _id(record: bytes) -> str:
    return record.split(b'"body":')[1].split(b'"')[1].decode()


def free(store: Store, *tags: int) -> None:
    store.free("q", "A", tags, on_error=lambda: pytest.fail("refused"))


def work(store: Store) -> None:
    claim(store, "A", 1)
    ack(store, 1)
    free(store, 1)
    store.release("q", "A", [2])
    free(store, 2)
    claim(store, "A", 10)


def work_when_due(store: Store) -> None:
    store.now = str(DUE_MS)
    work(store)


def held(store: Store) -> None:
    with_tickets(store)
    claim(store, "A", 1)


def purge(store: Store) -> None:
    store.purge("q")


CASES = {
    "tickets of producers": Case(work, with_tickets),
    "no tickets": Case(work, publish),
    "delayed": Case(work_when_due, lambda store: with_tickets(store, DUE_MS)),
    "leave": Case(lambda store: store.leases.leave("q", "A"), held),
    "leave with a task that runs": Case(lambda store: store.leases.leave("q", "A", [1]), held),
    "purge": Case(purge, held),
}


def finish(client: redis.Redis, gate: Gate) -> list[str]:
    """All that another consumer runs after the lease of the dead one, a few at a time."""
    store = Store(client, now=str(LATER_MS + DUE_MS))
    found: list[str] = []
    idle, tag = 0, 100
    while idle < 5:
        ids = claim(store, "B", tag, gate)
        for dead in store.leases.renew("q", "B", LEASE_MS) or ():
            store.leases.reclaim("q", dead)
        assert slots_in_use(store, "q").get("all:", 0) <= gate.limits[0].slots
        tags = range(tag, tag + len(ids))
        store.ack("q", "B", tags, on_error=lambda: pytest.fail("refused")) if ids else None
        store.free("q", "B", range(tag, tag + 10), on_error=lambda: pytest.fail("refused"))
        found += ids
        idle = 0 if ids else idle + 1
        tag += 10
    return found


@pytest.mark.parametrize("gate", [GATE, OTHER], ids=["the same limits", "others"])
@pytest.mark.parametrize("name", CASES)
def test_all_run_once_more_and_nothing_is_left(name: str, gate: Gate, client: redis.Redis) -> None:
    may_be_gone = {"0", "1"} if "leave" not in name else set()
    for death in every_death(client, CASES[name]):
        found = finish(client, gate)
        assert len(found) == len(set(found)), f"{name} at {death}"
        if name != "purge":
            assert set(MANY) - set(found) <= may_be_gone, f"{name} at {death}"
            assert len(found) >= len(MANY) - 1, f"{name} at {death}"
        assert client.keys("*gate*") == [], f"{name} at {death}"
        assert client.zrange("{q}:consumers", 0, -1) == [b"B"], f"{name} at {death}"
