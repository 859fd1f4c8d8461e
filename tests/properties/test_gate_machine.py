"""The moves of a queue with limits in any order: never over a limit, no slot and no message lost.

Consumers die and come back, tasks are acked before and after they end, messages are cancelled and
moved while they wait. The model knows which slots each living consumer's tasks have.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kombu_delayed.inspection.backlog import Backlog, Move
from kombu_delayed.inspection.gate_usage import slots_in_use
from kombu_delayed.message.envelope import open_envelope
from kombu_delayed.message.ticket import Gate, LimitNumbers, Ticket, Use, put_ticket
from kombu_delayed.store.store import Entry, Store
from tests.kit.claims import deliver, free
from tests.kit.state import message

#: The key of a rate expires by the server's own clock, which runs while the model's stands still.
#: These times are so long that no key expires.
SECOND_MS = 1_000_000
LEASE_MS = SECOND_MS
CONSUMERS = ("A", "B", "C")
SLOTS = {"all": 4, "customer": 2}
EVERY_MS, BURST = 0.04 * SECOND_MS, 3
GATE = Gate(
    "v1",
    (
        LimitNumbers("all", SLOTS["all"]),
        LimitNumbers("customer", SLOTS["customer"]),
        LimitNumbers("pace", 0, EVERY_MS, BURST),
    ),
)


@st.composite
def uses(draw: st.DrawFn) -> tuple[Use, ...]:
    if draw(st.integers(0, 2)) == 0:
        return (Use("pace"),)  # else slots are the tighter limit
    critical = draw(st.integers(0, 5)) == 0
    customer = Use("customer", draw(st.sampled_from(["x", "y", "z"])), 1, critical)
    needed = Use("all", "", draw(st.integers(1, 3)), critical), customer
    return (*needed, Use("pace")) if draw(st.booleans()) else needed


consumers = st.sampled_from(CONSUMERS)


def entry(id: str, ticket: Ticket | None, due: str = "", version: str = "v1") -> Entry:
    text = message(id).replace("{", '{"headers": {"id": "' + id + '"},', 1)
    if ticket is not None:
        text = put_ticket(text, ticket.text(version, id))
    return Entry(id, 0, text, due)


def id_of(record: bytes) -> str:
    return open_envelope(record[1:], 0).id


class Machine(RuleBasedStateMachine):
    client: redis.Redis
    store: Store

    @initialize()
    def begin(self) -> None:
        self.client.flushall()
        self.now_ms = 1_000_000
        self.count = 0
        self.tickets: dict[str, Ticket] = {}
        self.tag = 0
        #: The messages that each consumer holds, by tag, and the tags that have slots.
        self.held: dict[str, dict[int, str]] = {name: {} for name in CONSUMERS}
        self.slots: dict[str, dict[int, Ticket]] = {name: {} for name in CONSUMERS}
        self.leases: dict[str, int] = {}
        self.begun: list[int] = []
        self.gone: set[str] = set()
        self._tick(0)

    def _tick(self, ms: int) -> None:
        self.now_ms += ms
        self.store.now = str(self.now_ms)

    @rule(share=st.integers(1, 300))
    def time_goes_by(self, share: int) -> None:
        self._tick(share * SECOND_MS // 1000)

    @rule(
        fair=st.sampled_from(["", "t", "u"]),
        uses=uses(),
        delay=st.sampled_from(["", "", f"+{SECOND_MS // 200}", f"+{SECOND_MS // 5}"]),
        version=st.sampled_from(["v1", "v1", "v1", "v0", None]),
    )
    def send(self, fair: str, uses: tuple[Use, ...], delay: str, version: str | None) -> None:
        self.count += 1
        id = f"m{self.count}"
        self.tickets[id] = Ticket(fair, uses=uses)
        sent = entry(id, self.tickets[id] if version else None, delay, version or "")
        if delay:
            self.store.schedule("q", [sent])
        else:
            self.store.publish("q", [sent])

    def _deliver(self, name: str, want: int) -> int:
        answer = self.store.deliver(
            "q",
            name,
            want,
            self.tag + 1,
            lease_ms=LEASE_MS,
            leased=name in self.leases,
            promotions=3,
            gate=GATE,
        )
        if answer is None:
            assert self.leases.get(name, 0) <= self.now_ms
            self._forget(name)
            return 0
        self.leases[name] = self.now_ms + LEASE_MS
        for record in answer.records:
            self.tag += 1
            id = id_of(record)
            if GATE.has_ticket(record):
                self.held[name][self.tag] = id
                self.slots[name][self.tag] = self.tickets[id]
                self._note_begin(self.tickets[id])
            else:
                ticket = self.tickets[id].text("v1", id)
                assert self.store.admit("q", name, [(self.tag, ticket, b"")], GATE) == 1
        return len(answer.records) + answer.more

    def _note_begin(self, ticket: Ticket) -> None:
        paced = [use for use in ticket.uses if use.limit == "pace"]
        self.begun += [self.now_ms] * len(paced)

    @rule(name=consumers, want=st.integers(0, 4))
    def deliver(self, name: str, want: int) -> None:
        self._deliver(name, want)

    def _forget(self, name: str) -> None:
        self.leases.pop(name, None)
        self.held[name], self.slots[name] = {}, {}

    def _some(self, of: dict[int, Any], data: st.DataObject) -> list[int]:
        return data.draw(st.lists(st.sampled_from(sorted(of)), unique=True)) if of else []

    @rule(name=consumers, data=st.data())
    def ack_and_go_on(self, name: str, data: st.DataObject) -> None:
        tags = self._some(self.held[name], data)
        self._ack(name, tags)

    def _ack(self, name: str, tags: list[int], freed: Sequence[int] = ()) -> None:
        if tags:
            self.store.ack("q", name, tags, lambda: pytest.fail("refused"), freed)
            self.gone |= {self.held[name].pop(tag) for tag in tags}

    @rule(name=consumers, data=st.data())
    def end(self, name: str, data: st.DataObject) -> None:
        self._end(name, self._some(self.slots[name], data))

    def _end(self, name: str, tags: list[int]) -> None:
        self._ack(name, [tag for tag in tags if tag in self.held[name]], tags)
        for _ in range(2):  # the answer was lost: it is sent again
            if tags:
                self.store.free("q", name, tags, on_error=lambda: pytest.fail("refused"))
        for tag in tags:
            del self.slots[name][tag]

    @rule(name=consumers, data=st.data(), counted=st.booleans())
    def release(self, name: str, data: st.DataObject, counted: bool) -> None:
        tags = self._some(self.held[name], data)
        self.store.release("q", name, tags, counted=counted)
        for tag in tags:
            del self.held[name][tag]
        self._end(name, tags)

    @rule(name=consumers)
    def leave(self, name: str) -> None:
        self.store.leases.leave("q", name)
        self._forget(name)

    @rule(name=consumers)
    def die(self, name: str) -> None:
        """Its lease expires, and another consumer finds out."""
        self._tick(LEASE_MS + 1)
        self.store.leases.reclaim("q", name)
        self._forget(name)

    @rule(name=consumers)
    def others_renew(self, name: str) -> None:
        found = self.store.leases.renew("q", name, LEASE_MS)
        if found is None:
            self._forget(name)
            return
        self.leases[name] = self.now_ms + LEASE_MS
        for dead in found:
            self.store.leases.reclaim("q", dead)
            self._forget(dead)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.tickets:
            id = data.draw(st.sampled_from(sorted(self.tickets)))
            if Backlog(self.store, "q").cancel([id]) == [1]:
                self.gone.add(id)

    @rule(data=st.data(), delay=st.integers(0, 100))
    def reschedule(self, data: st.DataObject, delay: int) -> None:
        if self.tickets:
            id = data.draw(st.sampled_from(sorted(self.tickets)))
            Backlog(self.store, "q").reschedule([Move(id, f"+{delay * SECOND_MS // 1000}")])

    # Invariants.

    def _in_use(self, *, critical: bool) -> Counter[str]:
        """The slots of the tasks of all consumers, with or without those that pass a limit."""
        tickets = [ticket for name in CONSUMERS for ticket in self.slots[name].values()]
        found: Counter[str] = Counter()
        for use in (use for ticket in tickets for use in ticket.uses):
            if use.limit != "pace" and (critical or not use.passes):
                found[f"{use.limit}:{use.key}"] += use.cost
        return found

    @invariant()
    def slots_are_those_of_living_consumers(self) -> None:
        assert slots_in_use(self.store, "q") == dict(self._in_use(critical=True))

    @invariant()
    def nothing_is_over_its_limit(self) -> None:
        for name, count in self._in_use(critical=False).items():
            assert count <= SLOTS[name.split(":")[0]], (name, count)

    @invariant()
    def nothing_begins_faster_than_its_rate(self) -> None:
        for at, first in enumerate(self.begun):
            for count, last in enumerate(self.begun[at:], 1):
                assert count <= BURST + (last - first + 1) / EVERY_MS

    def teardown(self) -> None:
        """All messages run in the end, and nothing is left."""
        if not hasattr(self, "slots"):
            return
        for name in CONSUMERS:
            self.store.leases.leave("q", name)
            self._forget(name)
        left = set(self.tickets) - self.gone
        idle = 0
        for _ in range(60 + 20 * len(left)):
            found = self._deliver("A", 3)
            self.slots_are_those_of_living_consumers()
            self._end("A", sorted(self.slots["A"]))
            idle = 0 if found else idle + 1
            if idle > 10:
                break
            self._tick(SECOND_MS // 20)
        assert set(self.tickets) - self.gone == set()
        assert self.store.size("q") == (0, 0, 0)
        self.store.leases.leave("q", "A")
        self.store.purge("q")
        rest = re.compile(r"\{q\}:(moved|reclaimed:.*|gate:rate:.*)")
        assert not [key for key in self.client.keys("*") if not rest.fullmatch(key.decode())]


def test_gate_machine(client: redis.Redis) -> None:
    Machine.client, Machine.store = client, Store(client)
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=80,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


weights = st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=2, max_size=5)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(weights=weights, wants=st.lists(st.integers(1, 4), min_size=10, max_size=10))
def test_shares_are_fair_over_any_window(
    client: redis.Redis, store: Store, weights: list[float], wants: list[int]
) -> None:
    client.flushall()
    store.now = "1000"
    gate = Gate("v1", (LimitNumbers("all", 4),))
    for key, weight in enumerate(weights):  # one after the other, so that turns begin at any time
        ticket = Ticket(f"k{key}", weight, uses=(Use("all"),))
        store.publish("q", [entry(f"{key}-{n}", ticket) for n in range(40)])
    order: list[int] = []
    tag = 1
    for want in wants:
        answer = deliver(store, want=want, tag=tag, gate=gate)
        order += [int(id_of(record).split("-")[0]) for record in answer.records]
        tags = list(range(tag, tag + len(answer.records)))
        free(store, *tags)
        tag += len(tags)
    assert len(order) == sum(wants)
    total = sum(weights)
    for first in range(len(order)):
        for last in range(first + 1, len(order) + 1):
            window = Counter(order[first:last])
            for key, weight in enumerate(weights):
                had = window[key] / weight
                others = [
                    abs(had - window[n] / w) <= 1 / weight + 1 / w + 1e-6
                    for n, w in enumerate(weights)
                ]
                assert all(others), (weights, order, total)


@pytest.mark.parametrize("are_keys_new", [True, False])
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_nobody_is_overtaken(
    are_keys_new: bool, client: redis.Redis, store: Store, data: st.DataObject
) -> None:
    """One limit, tasks of any weight, of one key or a key each: first come, first go."""
    client.flushall()
    gate = Gate("v1", (LimitNumbers("all", 4),))
    order: list[int] = []
    running: list[int] = []
    costs = data.draw(st.lists(st.integers(1, 3), min_size=10, max_size=25))
    to_come = list(enumerate(costs))
    tag = 0
    while len(order) < len(costs):
        store.now = str(int(store.now or 1000) + 1)
        for number, cost in to_come[: data.draw(st.integers(1, 3))]:
            key = hashlib.md5(b"%d" % number).hexdigest() if are_keys_new else "k"
            ticket = Ticket(key, uses=(Use("all", cost=cost),))
            store.publish("q", [entry(str(number), ticket)])
            del to_come[0]
        answer = deliver(store, want=data.draw(st.integers(1, 3)), tag=tag + 1, gate=gate)
        order += [int(id_of(record)) for record in answer.records]
        running += range(tag + 1, tag + 1 + len(answer.records))
        tag += len(answer.records)
        ended = running[:: data.draw(st.integers(1, 2))]
        free(store, *ended)
        running = [each for each in running if each not in ended]
    assert order == sorted(order)
