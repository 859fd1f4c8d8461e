"""All moves in any order, on the real store and on the fake one: both do the same."""

from __future__ import annotations

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

from kombu_delayed.backlog import Backlog, Move
from kombu_delayed.store import Entry, Limits, Store
from kombu_delayed.testing import FakeBacklog, FakeStore, dump
from tests.contract.conftest import take_token
from tests.kit.state import message

CI = settings(
    max_examples=100,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

LEASE_MS = 100
DEAD_MS = 60_000  # the server's own clock must not come near it

#: One that looks like another's duplicate, and one that is not ASCII.
ids = st.sampled_from(["a", "b", "a\x1f2", "ü"])
bodies = st.sampled_from(["1", "2", "3"])
steps = st.integers(0, 9)
consumers = st.sampled_from(["A", "B", "C"])
delays = st.integers(-5, 60)
#: Relative, or absolute in a range that the clock passes.
dues = st.integers(0, 40).map("+{}".format) | st.integers(990, 1400).map(str)
batches = st.lists(st.tuples(ids, steps, bodies, dues), max_size=5)


def entry(id: str, step: int, body: str, due: str) -> Entry:
    headers = {"id": id, "eta": "2030-01-01", "origin": "gen1@host"}
    properties = {"delivery_tag": f"{body}{due}"}
    return Entry(id, step, message(body, headers=headers, properties=properties), due)


class BothStores(RuleBasedStateMachine):
    """Subclassed for each server, since a machine is made without arguments."""

    real: Store

    @initialize(
        partition_size=st.integers(2, 5),
        max_deliveries=st.integers(0, 3),
        dead_limit=st.sampled_from([1, 3, 100]),
    )
    def begin(self, partition_size: int, max_deliveries: int, dead_limit: int) -> None:
        self.real.client.flushall()
        self.stores: tuple[Store, FakeStore] = self.real, FakeStore()
        self.backlogs = Backlog(self.stores[0], "q"), FakeBacklog(self.stores[1], "q")
        for store in self.stores:
            store.partition_size = partition_size
            store.limits = Limits(max_deliveries, dead_limit, DEAD_MS / 1000)
        self.now_ms, self.tag = 1000, 1
        self.advance(0)

    def both(self, verb: str, *args: Any, **options: Any) -> Any:
        real, fake = (getattr(store, verb)("q", *args, **options) for store in self.stores)
        assert fake == real
        return real

    def both_backlogs(self, verb: str, *args: Any, **options: Any) -> None:
        def listed(found: Any) -> Any:
            return found if found is None else list(found)

        real, fake = (listed(getattr(each, verb)(*args, **options)) for each in self.backlogs)
        assert fake == real

    @rule(by_ms=st.integers(0, 15) | st.sampled_from([LEASE_MS, 200, DEAD_MS]))
    def advance(self, by_ms: int) -> None:
        self.now_ms += by_ms
        for store in self.stores:
            store.now = str(self.now_ms)

    @rule(batch=batches)
    def schedule(self, batch: list[tuple[str, int, str, str]]) -> None:
        self.both("schedule", [entry(*each) for each in batch])

    @rule(batch=batches)
    def publish(self, batch: list[tuple[str, int, str, str]]) -> None:
        self.both("publish", [entry(*each) for each in batch])

    @rule(
        each=st.tuples(ids, steps, bodies, dues),
        key=st.sampled_from("xyz"),
        conflict=st.sampled_from(["refuse", "replace", "debounce"]),
    )
    def schedule_unique(self, each: tuple[str, int, str, str], key: str, conflict: str) -> None:
        self.both("schedule_unique", entry(*each), key, conflict)

    @rule(
        name=consumers,
        want=st.integers(0, 3),
        leased=st.sampled_from([None, None, None, True, False]),
        lease_ms=st.sampled_from([0, LEASE_MS, LEASE_MS, LEASE_MS]),
        waits=st.sampled_from([True, True, True, False]),
        promotions=st.sampled_from([1, 250]),
    )
    def deliver(self, name: str, want: int, leased: bool | None, **options: Any) -> None:
        """Deliver; with `leased` None as one that knows whether it is."""
        if leased is None:
            leased = name in {each for each, *_ in self.real.consumers("q")}
        self.tag += want
        self.both("deliver", name, want, self.tag - want, leased=leased, **options)

    @rule(names=st.permutations(["A", "B", "C"]), by_ms=st.integers(0, 20))
    def all_work(self, names: list[str], by_ms: int) -> None:
        for name in names:
            self.advance(by_ms)
            self.deliver(name, 1, None, lease_ms=LEASE_MS, waits=True, promotions=250)

    @rule(
        name=consumers,
        verb=st.sampled_from(
            ["ack", "release", "count", "requeue", "park", "bury", "bury another"]
        ),
        data=st.data(),
        id=ids,
        delay=delays,
    )
    def finish(self, name: str, verb: str, data: st.DataObject, id: str, delay: int) -> None:
        known = [tag for tag, _ in self.both("recover", name, 0)]
        tags = data.draw(st.lists(st.sampled_from([*known, 10_000]), min_size=1, max_size=3))
        if verb == "ack":
            self.both("ack", name, tags, on_error=lambda: pytest.fail("an ack was refused"))
        elif verb == "park":
            self.both("park", name, [(tag, id, self.now_ms + delay) for tag in tags])
        elif verb.startswith("bury"):
            record = b"" if verb == "bury" else b'3{"deliveries":2}'
            self.both("bury", name, [(tag, id, "rejected", record) for tag in tags])
        else:
            behind = verb == "requeue"
            self.both("release", name, tags, counted=behind or verb == "count", behind=behind)

    @rule(name=consumers)
    def renew(self, name: str) -> None:
        self.both("renew", name, LEASE_MS)

    @rule(name=consumers, verb=st.sampled_from(["leave", "reclaim"]))
    def stop(self, name: str, verb: str) -> None:
        self.both(verb, name)

    @rule(verb=st.sampled_from(["replay", "purge_dead"]), data=st.data(), delay=delays)
    def dead(self, verb: str, data: st.DataObject, delay: int) -> None:
        known = self.both("dead_ids")
        chosen = data.draw(st.lists(st.sampled_from([*known, "missing"]), max_size=4))
        self.both("dead_letters", chosen)
        self.both("dead_page", (self.now_ms, data.draw(ids)), 2)
        self.both(verb, chosen, *([self.now_ms + delay] if verb == "replay" and delay else []))

    @rule(verb=st.sampled_from(["purge", "delete", *["announce"] * 8]))
    def whole(self, verb: str) -> None:
        self.both(verb)

    @rule()
    def take_tokens(self) -> None:
        for _ in range(3):
            real, fake = map(take_token, self.stores)
            assert fake == real

    @rule(chosen=st.lists(ids), members=st.booleans())
    def cancel(self, chosen: list[str], members: bool) -> None:
        self.both_backlogs("cancel", chosen, members=members)

    @rule(chosen=st.lists(ids))
    def take(self, chosen: list[str]) -> None:
        self.both_backlogs("take", chosen)

    @rule(
        chosen=st.lists(st.tuples(ids, dues, st.sampled_from(["", "2031-01-01"]))),
        members=st.booleans(),
    )
    def reschedule(self, chosen: list[tuple[str, str, str]], members: bool) -> None:
        self.both_backlogs("reschedule", [Move(*each) for each in chosen], members=members)

    @rule(id=ids, edges=st.lists(st.integers(1000, 1500)), needle=st.sampled_from(["", "1"]))
    def look(self, id: str, edges: list[int], needle: str) -> None:
        self.both_backlogs("get", id)
        self.both_backlogs("forecast", sorted(edges))
        bounds = sorted(edges[:2])
        real, fake = (
            [each for page in backlog.pages(*bounds, needle=needle, size=3) for each in page]
            for backlog in self.backlogs
        )
        assert fake == real

    @invariant()
    def both_are_in_one_state(self) -> None:
        real, fake = (dump(store, "q") for store in self.stores)
        assert fake == real
        self.both("size")
        self.both("consumers")
        self.both("dead_count")


def test_the_fake_does_what_the_real_one_does(client: redis.Redis) -> None:
    machine = type("Machine", (BothStores,), {"real": Store(client)})
    run_state_machine_as_test(machine, settings=CI)
