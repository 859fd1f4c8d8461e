"""A global limit over queues and shards in any order: never over it, no slot and no message lost.

Consumers share its slots, claim, die at any moment, do not hear answers, and calls of theirs arrive
late. The model knows which messages each living consumer may be running.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kombu_delayed.consumer.policy import shared_slots
from kombu_delayed.inspection.gate_usage import slots_in_use
from kombu_delayed.message.envelope import open_envelope
from kombu_delayed.message.ticket import Gate, LimitNumbers, Ticket, Use, put_ticket
from kombu_delayed.store.global_limits import pool_of
from kombu_delayed.store.store import Entry, Store
from tests.kit.sharing import LEASE_MS, Lossy, SharingConsumer
from tests.kit.state import message

CONSUMERS = ("A", "B", "C")
QUEUES = ("q", "q\x1f1", "r")
SLOTS = {"all": 4, "customer": 2}
GATE = Gate(
    "v1",
    (
        LimitNumbers("all", SLOTS["all"], is_global=True),
        LimitNumbers("customer", SLOTS["customer"], is_global=True),
        LimitNumbers("own", 3),
    ),
)
POOLS = [*map(pool_of, SLOTS)]

consumers, queues = st.sampled_from(CONSUMERS), st.sampled_from(QUEUES)


@st.composite
def uses(draw: st.DrawFn) -> tuple[Use, ...]:
    found = [Use("all", "", draw(st.integers(1, 3)))]
    if draw(st.booleans()):
        found = [Use("customer", draw(st.sampled_from(["x", "y"])))]
    if draw(st.booleans()):
        found.append(Use("own"))
    return tuple(found)


class Consumer(SharingConsumer):
    """Each life of a consumer has a different name."""

    def __init__(self, machine: Machine, name: str, life: int) -> None:
        super().__init__(machine.store, f"{name}{life}", lambda: machine.now_ms / 1000)
        self.running: dict[int, tuple[str, str]] = {}


class Machine(RuleBasedStateMachine):
    client: redis.Redis
    store: Any

    @initialize()
    def begin(self) -> None:
        self.client.flushall()
        self.now_ms = 1_000_000
        self.lives = 0
        self.tickets: dict[str, Ticket] = {}
        self.gone: set[str] = set()
        self.store.sent.clear()
        self._tick(0)
        self.living = {name: self._new(name) for name in CONSUMERS}

    def _new(self, name: str) -> Consumer:
        self.lives += 1
        return Consumer(self, name, self.lives)

    def _tick(self, ms: int) -> None:
        self.now_ms += ms
        self.store.store.now = str(self.now_ms)
        shared_slots.monotonic = lambda: self.now_ms / 1000  # type: ignore[attr-defined]

    @rule(ms=st.integers(1, 1_500))
    def time_goes_by(self, ms: int) -> None:
        self._tick(ms)

    @rule(queue=queues, uses=uses())
    def send(self, queue: str, uses: tuple[Use, ...]) -> None:
        id = f"m{len(self.tickets)}"
        self.tickets[id] = Ticket(uses=uses)
        text = message(id).replace("{", '{"headers": {"id": "' + id + '"},', 1)
        text = put_ticket(text, self.tickets[id].text("v1", id))
        self.store.publish(queue, [Entry(id, 0, text, "")])

    @rule(name=consumers, room=st.integers(0, 4), loses=st.sampled_from(["", "", "answer", "call"]))
    def share(self, name: str, room: int, loses: str) -> None:
        self.store.loses = loses
        consumer = self.living[name]
        consumer.shared.step(consumer, room, lambda queue: queue in QUEUES)
        self.store.loses = ""
        assert not consumer.lease.lost

    @rule(data=st.data())
    def a_call_arrives_late(self, data: st.DataObject) -> None:
        if self.store.sent:
            names = {each.name for each in self.living.values()}
            calls = [call for call in self.store.sent if call[1]["consumer"] in names]
            if calls:
                move, given = data.draw(st.sampled_from(calls))
                move(self.store.run, **{**given, "leased": 1})

    @rule(name=consumers, queue=queues, is_lost=st.booleans())
    def take_and_claim(self, name: str, queue: str, is_lost: bool) -> None:
        self.claim(name, queue, 0, False)
        self.share(name, 4, "")
        self.claim(name, queue, 4, is_lost)
        self._tick(200)
        self.share(name, 0, "")

    @rule(name=consumers, queue=queues, want=st.integers(0, 4), is_lost=st.booleans())
    def claim(self, name: str, queue: str, want: int, is_lost: bool) -> None:
        consumer = self.living[name]
        for each in tuple(consumer.unsure):
            self._run(consumer, each, consumer.recover(each, GATE))
        self._run(consumer, queue, consumer.claim(queue, GATE, want, is_lost))

    def _run(self, consumer: Consumer, queue: str, found: list[Any]) -> None:
        for tag, record in found:
            consumer.running[tag] = queue, open_envelope(record[1:], 0).id

    @rule(name=consumers, data=st.data())
    def end(self, name: str, data: st.DataObject) -> None:
        consumer = self.living[name]
        tags = sorted(consumer.running)
        self._end(consumer, data.draw(st.lists(st.sampled_from(tags), unique=True)) if tags else [])

    def _end(self, consumer: Consumer, tags: list[int]) -> None:
        for tag in tags:
            queue, id = consumer.running.pop(tag)
            refused = lambda: pytest.fail("refused")  # noqa: E731
            self.store.ack(queue, consumer.name, [tag], refused, [tag])
            consumer.shared.ended(tag)
            self.gone.add(id)

    @rule(name=consumers, places=st.permutations([*QUEUES, *POOLS]))
    def die(self, name: str, places: list[str]) -> None:
        """Its leases expire, and the others find out, one place after the other."""
        dead, self.living[name] = self.living[name], self._new(name)
        self._tick(LEASE_MS + 1)
        for each in self.living.values():
            for queue in each.lease.queues:
                assert self.store.leases.renew(queue, each.name, LEASE_MS) is not None
        for place in places:
            self.store.leases.reclaim(place, dead.name)
            self.nothing_is_over_its_limit()

    @rule(name=consumers)
    def leave(self, name: str) -> None:
        leaving, self.living[name] = self.living[name], self._new(name)
        leaving.shared.report(self.store, leaving.name, LEASE_MS)
        for place in (*QUEUES, *POOLS):
            self.store.leases.leave(place, leaving.name)

    def _possible(self) -> Counter[str]:
        """The slots of messages that consumers have, or were handed in a lost answer."""
        found: Counter[str] = Counter()
        record: Any
        for consumer in self.living.values():
            for queue in QUEUES:
                key = self.store.keys(queue).unacked(consumer.name)
                for record in self.client.hvals(key):
                    for use in self.tickets[open_envelope(record[1:], 0).id].uses:
                        if use.limit in SLOTS:
                            found[f"{use.limit}:{use.key}"] += use.cost
        return found

    def _known(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for pool in POOLS:
            found.update(slots_in_use(self.store, pool))
        return found

    @invariant()
    def nothing_is_over_its_limit(self) -> None:
        known = self._known()
        for slot, count in self._possible().items():
            assert count <= known[slot], slot
        for slot, count in known.items():
            most = SLOTS[slot.split(":")[0]]
            assert count <= most, slot

    def teardown(self) -> None:
        """All messages run in the end, and no slot is left."""
        if not hasattr(self, "living"):
            return
        idle = 0
        for _ in range(20 + 20 * len(self.tickets)):
            before = len(self.gone)
            for name, consumer in self.living.items():
                self.share(name, 4, "")
                for queue in QUEUES:
                    self.claim(name, queue, 4, False)
                self.nothing_is_over_its_limit()
                self._end(consumer, [*consumer.running])
            self._tick(200)
            idle = 0 if len(self.gone) > before else idle + 1
            if idle > 15:
                break
        assert {*self.tickets} == self.gone
        for name in CONSUMERS:
            self.leave(name)
        assert self._known() == {}
        rest = re.compile(rb".*(:moved|:reclaimed:.*|:gate:(blocked|called):[^|]*)")
        for queue in QUEUES:
            self.store.purge(queue)
        keys: Any = self.client.keys("*")
        assert [key for key in keys if not rest.fullmatch(key)] == []


def test_global_limit_machine(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_slots, "monotonic", lambda: math.nan)  # set by the machine
    Machine.client, Machine.store = client, Lossy(Store(client))
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=30,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
