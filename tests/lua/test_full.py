"""A server with no memory left: nothing new gets in, and everything inside can get out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from kombu_delayed.errors import ServerFull
from kombu_delayed.inspection.backlog import Backlog, Move
from kombu_delayed.inspection.gate_usage import slots_in_use
from kombu_delayed.message.ticket import OPEN_GATE, Gate, LimitNumbers, Ticket, Use
from kombu_delayed.store.policies.declared import PolicyRecord
from kombu_delayed.store.policies.overrides import Override
from kombu_delayed.store.store import Limits, Store
from tests.kit import claims
from tests.kit.claims import deliver, full
from tests.kit.state import dead_state, entry, message, returned, seed, state

A, B, C = (message(body, headers={"id": body}) for body in "abc")

Call = Callable[[Store], Any]


def prepare(store: Store) -> None:
    """Make one of everything at 1000, then set the clock to 3000."""
    store.client.flushall()
    store.now = "1000"
    store.limits = Limits(max_deliveries=3, dead_limit=5)
    store.partition_size = 3
    dues = {"d": 2000, "e": 2500, "f": 4000, "g": 5000, "h": 6000}
    store.schedule("q", [entry(id, due) for id, due in dues.items()])
    store.schedule("q", [entry("d", 2000, body="other")])
    store.bury("q", "A", [(1, id, "rejected", b"0" + A.encode()) for id in ("x", "y")])
    poison = "0" + returned(C, 2)
    seed(
        store.client,
        {
            "q": [message("r1"), message("r2")],
            "{q}:unacked:A": {"1": "0" + A, "2": "3" + B, "3": poison},
            "{q}:unacked:gone": {"1": "0" + A, "2": "3" + B, "3": poison},
            "{q}:unacked:B": {str(tag): f"0{tag}" for tag in range(1500)},
            "{q}:unacked:gone too": {str(tag): f"0{tag}" for tag in range(1500)},
            "{q}:consumers": {"A": 9000, "B": 9000, "gone": 900, "gone too": 900},
            "{q}:armed": "4000 A",
            "{q}:unique": {"past": "gone"},
            "{q}:unique-due": {"past": 500},
            "{q}:unique-held": {"key": "a", "past": "gone"},
            "{q}:unique-until": {"key": 9000, "past": 500},
        },
    )
    store.now = "3000"


def unique(store: Store, due_ms: int) -> Any:
    return store.schedule_unique("q", entry("n", due_ms), "new", "refuse", until_end=True)


REFUSED: dict[str, Call] = {
    "schedule": lambda s: s.schedule("q", [entry("n", 9000), entry("m", 4500)]),
    "schedule what is due": lambda s: s.schedule("q", [entry("n", 500), entry("m", 600)]),
    "schedule both": lambda s: s.schedule("q", [entry("n", 500), entry("m", 9000)]),
    "schedule with an expiry": lambda s: s.schedule("q", [entry("n", 500)], 60_000),
    "schedule a taken id": lambda s: s.schedule("q", [entry("d", 9000, body="third")]),
    "schedule many": lambda s: s.schedule("q", [entry(f"n{n}", 9000 + n) for n in range(200)]),
    "publish": lambda s: s.publish("q", [entry("n"), entry("m", step=3)]),
    "publish with an expiry": lambda s: s.publish("q", [entry("n")], 60_000),
    "publish to a new queue": lambda s: s.publish("new", [entry("n")]),
    "schedule a unique message": lambda s: unique(s, 9000),
    "schedule a unique message that is due": lambda s: unique(s, 500),
    "replay": lambda s: s.dead.replay("q", ["x", "y"]),
    "replay at a time": lambda s: s.dead.replay("q", ["x", "y"], 4500),
    "schedule to a new queue": lambda s: s.schedule("new", [entry("n", 9000)]),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_nothing_gets_in(call: Call, store: Store, client: redis.Redis) -> None:
    prepare(store)
    before = state(client)
    with full(client):
        for _ in range(2):
            with pytest.raises(ServerFull, match="nothing was stored"):
                call(store)
            assert state(client) == before
    call(store)
    assert state(client) != before


GATE = Gate("v", (LimitNumbers("all", 1, 1000.0, 1),))


def claim(store: Store, tag: int = 10, **options: Any) -> Any:
    return deliver(store, tag=tag, leased=True, **options)


def admit(store: Store) -> int:
    ticket = Ticket(uses=(Use("all"),))
    return store.admit("q", "A", [(tag, ticket.text("v", f"n{tag}"), b"") for tag in (1, 2)], GATE)


def deliver_gated(store: Store) -> Any:
    return admit(store), claim(store, gate=GATE)


def free(store: Store) -> Any:
    found = deliver_gated(store)
    claims.free(store, 10)
    return found, slots_in_use(store, "q"), claim(store, tag=20, gate=GATE)


def free_slots(store: Store) -> Any:
    found = deliver_gated(store)
    (tag,) = store.client.hkeys("{q}:gate:slots:A")
    claims.free(store, int(tag))
    return found, slots_in_use(store, "q"), claim(store, tag=20, gate=GATE)


def hold(store: Store) -> int:
    return store.ask("hold", "q", entries=["key", "a", 60_000])


def refund(store: Store) -> Any:
    gate = Gate("v", (LimitNumbers("all", 0, 60_000.0, 3),))
    found = admit(store), claim(store, gate=gate)
    given = {"limits": gate.numbers, "due_ms": 1000, "uses": ["all:", 1]}
    return found, store.ask("refund", "q", **given)


def pause(store: Store) -> Any:
    store.pauses.pause("q", "me", "it is full")
    return store.pauses.of("q"), claim(store), store.pauses.resume("q"), claim(store)


def set_limit(store: Store) -> Any:
    found = deliver_gated(store)
    store.overrides.set("q", "all", Override(2, 60_000.0, 2))
    return found, claim(store, tag=20, gate=GATE), store.overrides.reset("q", "all")


def declare(store: Store) -> Any:
    ours = store.policies.declare("q", "{}", "me", PolicyRecord())
    return ours, store.policies.declare("q", "{1}", "me", store.policies.read("q"))


def leave_running(store: Store) -> Any:
    found = deliver_gated(store)
    store.leases.leave("q", "A", [10])
    return found, slots_in_use(store, "q")


def revise(store: Store, due_ms: int) -> bool:
    backlog = Backlog(store, "q")
    return backlog.revise(backlog.get("g")[0], 0, message("new").encode(), due_ms)


def reschedule(store: Store, due: str) -> list[int]:
    return Backlog(store, "q").reschedule([Move("g", due)])


WORKS: dict[str, Call] = {
    "admit": admit,
    "cancel": lambda s: Backlog(s, "q").cancel(["d", "e"]),
    "change": lambda s: revise(s, 4500),
    "change and run now": lambda s: revise(s, 500),
    "reschedule": lambda s: reschedule(s, "4500"),
    "run now": lambda s: reschedule(s, "500"),
    "deliver through a gate": deliver_gated,
    "deliver past a gate": lambda s: (deliver_gated(s), claim(s, tag=20, gate=OPEN_GATE)),
    "free": free,
    "free slots": free_slots,
    "hold": hold,
    "refund": refund,
    "call": lambda s: (deliver_gated(s), s.ask("call", "q")),
    "latest": lambda s: s.ask("latest", "q", key="k", due_ms=2000),
    "pause and resume": pause,
    "set a limit": set_limit,
    "declare": declare,
    "leave with tasks that run": leave_running,
    "clear": lambda s: (admit(s), s.purge("q")),
    "deliver": claim,
    "deliver to a newcomer": lambda s: deliver(s, "new"),
    "deliver without a lease": lambda s: deliver(s, lease_ms=0),
    "deliver some": lambda s: claim(s, want=1, promotions=1),
    "deliver with an expiry": lambda s: claim(s, want=1, expires_ms=60_000),
    "deliver nothing": lambda s: claim(s, want=0),
    "deliver from an empty queue": lambda s: s.deliver("new", "A", 9, 1, lease_ms=1000),
    "recover": lambda s: s.leases.recover("q", "A", 1),
    "ack": lambda s: claims.ack(s, 1, 3),
    "release": lambda s: s.release("q", "A", [1, 2]),
    "release poison": lambda s: s.release("q", "A", [1, 2, 3], counted=True),
    "reclaim": lambda s: s.leases.reclaim("q", "gone"),
    "reclaim much": lambda s: s.leases.reclaim("q", "gone too"),
    "park": lambda s: s.park("q", "A", [(1, "n", 9000), (2, "d", 4500)]),
    "park and split": lambda s: s.park("q", "A", [(n, f"n{n}", 4000 + n) for n in range(4)]),
    "bury": lambda s: s.bury("q", "A", [(1, "x", "rejected", b""), (2, "n", "rejected", b"")]),
    "bury what was taken for good": lambda s: s.bury("q", "A", [(9, "x", "rejected", b"0{}")]),
    "leave": lambda s: s.leases.leave("q", "A"),
    "leave with much": lambda s: s.leases.leave("q", "B"),
    "renew": lambda s: s.leases.renew("q", "A", 30_000),
    "announce": lambda s: s.claimable.announce("q"),
    "purge": lambda s: s.purge("q"),
    "delete": lambda s: s.delete("q"),
    "purge_dead": lambda s: s.dead.purge("q", ["x"]),
    "dead_letters": lambda s: s.dead.letters("q", s.dead.ids("q")),
    "size": lambda s: s.size("q"),
}


@pytest.mark.parametrize("call", WORKS.values(), ids=WORKS)
def test_what_is_in_gets_out(call: Call, store: Store, client: redis.Redis) -> None:
    """Each move does the same as on a server that has room."""
    prepare(store)
    expected, after = call(store), dead_state(client)
    prepare(store)
    with full(client):
        assert call(store) == expected
        assert dead_state(client) == after
