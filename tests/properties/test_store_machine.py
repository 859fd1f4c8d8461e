"""All moves in any order, against a model of where messages are and of what consumers know.

The model knows less than the server: it does not know partitions, and among messages due at one
instant it does not know the order. Time is `Store.now`; nothing here sleeps.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kombu_delayed.inspection.backlog import Backlog, Move
from kombu_delayed.message.envelope import open_kept
from kombu_delayed.store.claimable import Delivered
from kombu_delayed.store.dead_letters import DeadLetter
from kombu_delayed.store.store import Entry, Limits, Store
from tests.kit.backlog import check_backlog, records
from tests.kit.state import all_keys, message, state

STEPS = (0, 3, 6, 9)
CONSUMERS = ("A", "B", "C")
LEASE_MS = 100

CI = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

#: Small, so that the bounds are reached; the age is longer than a few leases.
DEAD_LIMITS = (1, 3, 5, 100_000)
DEAD_MS = 60_000  # the server's own clock must not come near it

#: The scripts must accept them unchanged.
ids = st.sampled_from(["a", "{b}%1", 'ü"\\'])
steps = st.sampled_from(STEPS)
consumers = st.sampled_from(CONSUMERS)
#: Clustered, so that many are due at one instant.
delays = st.integers(1, 90) | st.sampled_from([10, 20, 20, 20, 30]) | st.integers(200, 400)


@dataclass
class Told:
    """News that a consumer has received and not acted on yet."""

    leased: bool = False
    now: bool = False
    due_at: float = math.inf


@dataclass
class Message:
    """A message and, for a delayed one, the entry that put it there."""

    body: str
    step: int
    id: str
    due_ms: int | None = None
    was_promoted_at_due_ms: int | None = None
    deliveries: int | None = None
    entry: Entry | None = None
    #: Its id in the backlog, chosen by the call that put it there.
    waits_as: str = ""


@dataclass
class Buried:
    """A dead letter: the message as it was held, and its note."""

    message: Message
    reason: str
    consumer: str
    at_ms: int
    deliveries: int


@dataclass
class Model:
    """The place of each message, by its body; of a dead one by its name among the dead."""

    limits: Limits

    delayed: dict[str, Message] = field(default_factory=dict)
    ready: dict[int, list[Message]] = field(default_factory=lambda: {step: [] for step in STEPS})
    held: dict[str, dict[int, Message]] = field(
        default_factory=lambda: {name: {} for name in CONSUMERS}
    )
    dead: dict[str, Buried] = field(default_factory=dict)
    leases: dict[str, int] = field(default_factory=dict)

    def to_heads(self, messages: list[Message]) -> None:
        for each in reversed(messages):
            each.deliveries = each.deliveries or 0
            self.ready[each.step].insert(0, each)

    def after_an_attempt(
        self, messages: list[Message], consumer: str, now_ms: int, behind: bool = False
    ) -> None:
        """Move to the heads of the lists or behind the others; bury those tried too often."""
        most = self.limits.max_deliveries
        for each in messages if behind else reversed(messages):
            deliveries = (each.deliveries or 0) + 1
            if most and deliveries >= most:
                reason = f"delivered {deliveries} times without success"
                self.bury(each.id, Buried(each, reason, consumer, now_ms, deliveries))
            else:
                each.deliveries = deliveries
                same_step = self.ready[each.step]
                same_step.insert(len(same_step) if behind else 0, each)

    def bury(self, id: str, letter: Buried) -> None:
        """Add under the id or, if that is taken, a new name; then drop the old and too many."""
        numbered = (f"{id}\x1f{n}" for n in itertools.count(max(len(self.dead), 1) + 1))
        names = itertools.chain([id], numbered)
        self.dead[next(name for name in names if name not in self.dead)] = letter
        oldest = self.dead_ids
        aged = [id for id in oldest if self.dead[id].at_ms <= letter.at_ms - DEAD_MS]
        too_many = oldest[: max(len(oldest) - self.limits.dead_limit, 0)]
        for gone in {*aged, *too_many}:
            del self.dead[gone]

    @property
    def dead_ids(self) -> list[str]:
        """The oldest first; Redis sorts those of one instant by their bytes."""
        return sorted(self.dead, key=lambda id: (self.dead[id].at_ms, id.encode()))

    @property
    def any_ready(self) -> bool:
        return any(self.ready.values())

    @property
    def earliest(self) -> float:
        return min((each.due_ms or 0 for each in self.delayed.values()), default=math.inf)


def read(record: str) -> tuple[str, int, dict[str, Any]]:
    envelope = json.loads(record[1:])
    return envelope["body"], int(record[0]), envelope


class StoreMachine(RuleBasedStateMachine):
    """Subclassed for each server, since a machine is made without arguments."""

    client: redis.Redis
    store: Store

    @initialize(
        partition_size=st.integers(2, 5),
        bucket_bytes=st.sampled_from([1, 1_000_000]),
        max_deliveries=st.integers(0, 3),
        dead_limit=st.sampled_from(DEAD_LIMITS),
    )
    def begin(
        self, partition_size: int, bucket_bytes: int, max_deliveries: int, dead_limit: int
    ) -> None:
        self.client.flushall()
        self.store.partition_size = partition_size
        self.store.bucket_bytes = bucket_bytes
        self.store.limits = Limits(max_deliveries, dead_limit, DEAD_MS / 1000)
        self.model = Model(self.store.limits)
        self.told = {name: Told() for name in CONSUMERS}
        self.past: dict[str, set[int]] = {name: set() for name in CONSUMERS}
        self.now_ms = 1000
        self.tag = 0
        self.bodies = 0
        self.advance(0)

    # Producers.

    def entry(self, id: str, step: int, due: str) -> tuple[Entry, Message]:
        self.bodies += 1
        body = f"{self.bodies}"
        entry = Entry(id, step, message(body, headers={"id": id}), due)
        return entry, Message(body, step, id, entry=entry, waits_as=id)

    @rule(batch=st.lists(st.tuples(ids, steps), min_size=1, max_size=4), late=st.booleans())
    def publish(self, batch: list[tuple[str, int]], late: bool) -> None:
        due = str(self.now_ms - len(batch) + 1) if late else ""
        made = [self.entry(id, step, due) for id, step in batch]
        entries = [entry for entry, _ in made]
        if late:
            assert self.store.schedule("q", entries) == (0, len(batch), 0)
        else:
            assert self.store.publish("q", entries) == len(batch)
        for _, each in made:
            self.model.ready[each.step].append(each)

    @rule(
        batch=st.lists(st.tuples(ids, steps, delays), min_size=1, max_size=12), fixed=st.booleans()
    )
    def schedule(self, batch: list[tuple[str, int, int]], fixed: bool) -> None:
        made = []
        for id, step, delay in batch:
            due_ms = self.now_ms + delay
            made.append(self.entry(id, step, str(due_ms) if fixed else f"+{delay}"))
            made[-1][1].due_ms = due_ms
        counts = self.store.schedule("q", [entry for entry, _ in made])
        assert counts == (len(batch), 0, 0)
        self.model.delayed.update((each.body, each) for _, each in made)

    @precondition(lambda self: any(each.entry for each in self.model.delayed.values()))
    @rule(data=st.data())
    def schedule_again(self, data: st.DataObject) -> None:
        known = [each for each in self.model.delayed.values() if each.entry]
        entry = data.draw(st.sampled_from(known)).entry
        assert entry
        later = Entry(entry.id, entry.step, entry.message, str(self.now_ms + 500))
        assert self.store.schedule("q", [later]) == (0, 0, 1)

    # Consumers.

    @rule(name=consumers)
    def take_tokens(self, name: str) -> None:
        for token, at_ms in self.client.zpopmin("{q}:wake", 2):
            if token == b"now":
                assert at_ms == 0
                self.told[name].now = True
            else:
                assert token == b"due"
                self.told[name].due_at = min(self.told[name].due_at, at_ms)

    @rule(name=consumers)
    def work(self, name: str) -> None:
        """One round of a consumer with much room."""
        self.take_tokens(name)
        self.deliver(name, 20, 250, True)

    @rule(
        name=consumers,
        want=st.integers(0, 6),
        promotions=st.sampled_from([1, 3, 250]),
        waits=st.sampled_from([True, True, False]),
    )
    def deliver(self, name: str, want: int, promotions: int, waits: bool) -> None:
        answer, newcomer = self.delivered(name, want, promotions, waits)
        if not waits:
            assert answer.next_due_ms == 0
            return
        earliest = self.model.earliest
        turn_is_over = bool(answer.records) and answer.consumers > 1
        # A consumer that passes the promise on comes later, to check on it.
        assert answer.next_due_ms in (0, earliest + 500 if turn_is_over else earliest)
        if earliest != math.inf:
            assert turn_is_over or not newcomer or answer.next_due_ms
        self.told[name].now = False
        self.told[name].due_at = answer.next_due_ms or math.inf

    def delivered(
        self, name: str, want: int, promotions: int, waits: bool
    ) -> tuple[Delivered, bool]:
        """Deliver, as a newcomer if the lease was lost; also returns whether it was one."""
        has_urgent = self.client.zcard(self.store.keys("q").urgent) > 1
        answer = self.call_deliver(name, want, promotions, waits)
        if answer is None:
            assert self.told[name].leased
            assert name not in self.model.leases
            self.told[name].leased = False
            answer = self.call_deliver(name, want, promotions, waits)
        assert answer is not None
        assert answer.now_ms == self.now_ms
        newcomer = not self.told[name].leased
        self.told[name].leased = True
        self.model.leases[name] = self.now_ms + LEASE_MS
        assert answer.consumers == len(self.model.leases)
        records = [record.decode() for record in answer.records]
        self.promoted(promotions, records, has_urgent)
        self.taken(name, want, records)
        assert answer.more == (self.model.any_ready or self.model.earliest <= self.now_ms)
        return answer, newcomer

    def call_deliver(self, name: str, want: int, promotions: int, waits: bool) -> Delivered | None:
        return self.store.deliver(
            "q",
            name,
            want,
            self.tag + 1,
            lease_ms=LEASE_MS,
            leased=self.told[name].leased,
            waits=waits,
            promotions=promotions,
        )

    def promoted(self, promotions: int, records: list[str], has_urgent: bool) -> None:
        """Promote in the model: the first due messages, up to a limit, behind those already ready.

        With several priorities, only half as many of the first due, plus more urgent messages.
        """
        due_count = sum((each.due_ms or 0) <= self.now_ms for each in self.model.delayed.values())
        left = self.server_delayed()
        gone = [each for body, each in self.model.delayed.items() if body not in left]
        first_due = math.ceil(promotions / 2) if has_urgent else promotions
        most = first_due + (promotions if has_urgent else 0)
        assert min(first_due, due_count) <= len(gone) <= min(most, due_count)
        last_ms = max((each.due_ms or 0 for each in gone), default=0)
        assert last_ms <= self.now_ms
        for each in gone:
            del self.model.delayed[each.body]
        assert has_urgent or self.model.earliest >= last_ms
        order = [read(record)[0] for record in [*records, *self.server_ready()]]
        for each in sorted(gone, key=lambda each: order.index(each.body)):
            same_step = self.model.ready[each.step]
            behind = same_step[-1] if same_step else None
            if behind in gone:
                assert behind
                assert (behind.was_promoted_at_due_ms or 0) <= (each.due_ms or 0)
            each.was_promoted_at_due_ms, each.due_ms, each.entry = each.due_ms, None, None
            same_step.append(each)

    def taken(self, name: str, want: int, records: list[str]) -> None:
        """Hand out in the model: the most urgent first, from the heads of the lists."""
        in_order = [each for step in STEPS for each in self.model.ready[step]]
        assert [read(record)[0] for record in records] == [each.body for each in in_order[:want]]
        for each in in_order[:want]:
            self.model.ready[each.step].remove(each)
            self.tag += 1
            self.model.held[name][self.tag] = each

    @precondition(lambda self: any(self.model.held.values()))
    @rule(
        data=st.data(), verb=st.sampled_from(["ack", "release", "count", "requeue", "bury", "park"])
    )
    def finish(self, data: st.DataObject, verb: str) -> None:
        name = data.draw(st.sampled_from([n for n in CONSUMERS if self.model.held[n]]))
        held = self.model.held[name]
        tags = data.draw(st.lists(st.sampled_from(sorted(held)), min_size=1, unique=True))
        if verb == "park":
            self.park(name, tags, data.draw(delays))
            return
        if verb == "ack":
            self.store.ack("q", name, tags, on_error=lambda: pytest.fail("an ack was refused"))
        elif verb == "bury":
            entries = [(tag, held[tag].id, f"rejected {tag}", b"") for tag in tags]
            assert self.store.bury("q", name, entries) == len(tags)
            for tag in tags:
                count = (held[tag].deliveries or 0) + 1
                letter = Buried(held[tag], f"rejected {tag}", name, self.now_ms, count)
                self.model.bury(held[tag].id, letter)
        elif verb == "release":
            assert self.store.release("q", name, tags) == len(tags)
            self.model.to_heads([held[tag] for tag in sorted(tags)])
        else:
            behind = verb == "requeue"
            assert self.store.release("q", name, tags, counted=True, behind=behind) == len(tags)
            in_order = [held[tag] for tag in (tags if behind else sorted(tags))]
            self.model.after_an_attempt(in_order, name, self.now_ms, behind)
        for tag in tags:
            del held[tag]
        self.past[name].update(tags)

    def park(self, name: str, tags: list[int], delay: int) -> None:
        """A consumer parks messages that were never promoted and have no due time yet."""
        held = self.model.held[name]
        due_ms = self.now_ms + delay
        tags = [tag for tag in tags if held[tag].was_promoted_at_due_ms is None]
        assert self.store.park("q", name, [(tag, "a", due_ms) for tag in tags]) == len(tags)
        for tag in tags:
            each = held.pop(tag)
            each.due_ms, each.entry, each.waits_as = due_ms, None, "a"
            self.model.delayed[each.body] = each
        self.past[name].update(tags)

    @precondition(lambda self: any(self.past.values()))
    @rule(
        data=st.data(),
        verb=st.sampled_from(["ack", "release", "count", "bury", "park", "recover"]),
    )
    def haunt(self, data: st.DataObject, verb: str) -> None:
        """A consumer settles, again or too late, messages that it does not hold any more."""
        name = data.draw(st.sampled_from([n for n in CONSUMERS if self.past[n]]))
        past = sorted(self.past[name])
        tags = data.draw(st.lists(st.sampled_from(past), min_size=1, max_size=5, unique=True))
        before = state(self.client)
        if verb == "ack":
            self.store.ack("q", name, tags, on_error=lambda: pytest.fail("an ack was refused"))
            self.store.size("q")
        elif verb == "bury":
            assert self.store.bury("q", name, [(tag, "a", "late", b"") for tag in tags]) == 0
        elif verb == "park":
            due_ms = self.now_ms + 1
            assert self.store.park("q", name, [(tag, "a", due_ms) for tag in tags]) == 0
        elif verb == "recover":
            found = {tag for tag, _ in self.store.leases.recover("q", name, 0)}
            assert found == set(self.model.held[name])
        else:
            assert self.store.release("q", name, tags, counted=verb == "count") == 0
        assert state(self.client) == before

    @precondition(lambda self: any(self.model.held[name] for name in self.model.leases))
    @rule(data=st.data())
    def haunt_who_reclaimed(self, data: st.DataObject) -> None:
        """One sleeps through its lease, another gets its messages, and then both continue."""
        zombie = data.draw(
            st.sampled_from([n for n in CONSUMERS if n in self.model.leases and self.model.held[n]])
        )
        other = next(name for name in CONSUMERS if name != zombie)
        self.work(other)
        lease_end_ms = self.model.leases.get(zombie, 0)
        self.advance(max(lease_end_ms - self.now_ms, 0))
        self.renew(other, late=False)
        if data.draw(st.booleans()):
            self.work(other)
        self.haunt(data, data.draw(st.sampled_from(["ack", "release", "count", "bury"])))

    # Dead letters.

    @precondition(lambda self: self.model.dead)
    @rule(data=st.data(), delay=st.none() | delays | st.integers(-5, 0))
    def replay(self, data: st.DataObject, delay: int | None) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.model.dead)), unique=True))
        due_ms = 0 if delay is None else self.now_ms + delay
        names = [*chosen, "missing", *chosen[:1]]
        assert self.store.dead.replay("q", names, due_ms) == len(chosen)
        for name in chosen:
            each = self.model.dead.pop(name).message
            each.deliveries = each.entry = None
            if delay is None:
                self.model.ready[each.step].append(each)
            else:
                each.due_ms, each.was_promoted_at_due_ms = due_ms, None
                each.waits_as = name.partition("\x1f")[0]
                self.model.delayed[each.body] = each

    @precondition(lambda self: len(self.model.dead) > 2)
    @rule(data=st.data())
    def purge_dead(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.model.dead)), unique=True))
        assert self.store.dead.purge("q", [*chosen, "missing"]) == len(chosen)
        for name in chosen:
            del self.model.dead[name]

    # Operators.

    @property
    def backlog(self) -> Backlog:
        return Backlog(self.store, "q")

    def waiting_as(self, id: str) -> list[Message]:
        return [each for each in self.model.delayed.values() if each.waits_as == id]

    @contextmanager
    def leaving_early(self) -> Iterator[None]:
        """Run a call that takes messages out of the backlog before they are due."""
        yield

    @rule(chosen=st.lists(ids, min_size=1, max_size=3), reads=st.booleans())
    def cancel(self, chosen: list[str], reads: bool) -> None:
        gone = [self.waiting_as(id) for id in dict.fromkeys(chosen)]
        if reads:
            with self.leaving_early():
                taken = list(self.backlog.take(chosen))
            bodies = sorted(json.loads(each.kept.message)["body"] for each in taken)
            assert bodies == sorted(each.body for group in gone for each in group)
        else:
            repeats = len(chosen) - len(gone)
            with self.leaving_early():
                counts = self.backlog.cancel(chosen)
            assert sorted(counts) == sorted([*map(len, gone), *[0] * repeats])
        for each in itertools.chain(*gone):
            del self.model.delayed[each.body]

    @precondition(lambda self: len(self.model.delayed) > 1)
    @rule(data=st.data())
    def cancel_members(self, data: st.DataObject) -> None:
        """Cancel single messages, even if others share their id, and one that does not exist."""
        bodies = {
            member: json.loads(open_kept(record.encode()).message)["body"]
            for member, record in records(self.client).items()
        }
        chosen = data.draw(st.lists(st.sampled_from(sorted(bodies)), max_size=3, unique=True))
        with self.leaving_early():
            counts = self.backlog.cancel([*chosen, "missing", *chosen[:1]], members=True)
        assert counts == [*[1] * len(chosen), 0, *[0] * len(chosen[:1])]
        for member in chosen:
            del self.model.delayed[bodies[member]]

    @rule(
        chosen=st.lists(
            st.tuples(ids, delays | st.integers(-20, 0), st.booleans()), min_size=1, max_size=3
        )
    )
    def reschedule(self, chosen: list[tuple[str, int, bool]]) -> None:
        moves, expected, made_ready = [], [], []
        for id, delay, relative in chosen:
            due_ms = self.now_ms + (max(delay, 0) if relative else delay)
            moves.append(Move(id, f"+{max(delay, 0)}" if relative else str(due_ms)))
            moved = self.waiting_as(id)
            expected.append(len(moved))
            for each in moved:
                each.due_ms = due_ms
            if due_ms <= self.now_ms:
                made_ready.append(moved)
                for each in moved:
                    del self.model.delayed[each.body]
        with self.leaving_early():
            assert self.backlog.reschedule(moves) == expected
        order = [read(record)[0] for record in self.server_ready()]
        for moved in made_ready:
            for each in sorted(moved, key=lambda each: order.index(each.body)):
                each.was_promoted_at_due_ms, each.due_ms, each.entry = each.due_ms, None, None
                self.model.ready[each.step].append(each)

    # The end of a consumer.

    def who_knows(self, data: st.DataObject) -> str:
        """Draw a consumer, preferably one that has news."""
        knowing = [n for n, told in self.told.items() if told.now or told.due_at != math.inf]
        return data.draw(st.sampled_from(knowing or CONSUMERS))

    @rule(data=st.data(), leaves=st.booleans())
    def stop(self, data: st.DataObject, leaves: bool) -> None:
        self.stop_consumer(self.who_knows(data), leaves)

    def stop_consumer(self, name: str, leaves: bool) -> None:
        """Stop in good order, or only stop consuming this queue."""
        if leaves:
            self.store.leases.leave("q", name)
            self.model.to_heads([each for _, each in sorted(self.model.held[name].items())])
            self.past[name].update(self.model.held[name])
            self.model.held[name] = {}
            self.model.leases.pop(name, None)
            self.told[name].leased = False
        else:
            self.store.claimable.announce("q")
        self.told[name].now, self.told[name].due_at = False, math.inf

    @rule(first=consumers, second=consumers, how=st.sampled_from(["leave", "announce", "die"]))
    def hand_over(self, first: str, second: str, how: str) -> None:
        """One consumer follows another; news of the first must reach the second."""
        self.work(second)
        self.work(first)
        if how == "die":
            self.advance(LEASE_MS - 1)
            self.renew(second, late=False)
            self.advance(1)
            self.renew(second, late=False)
        else:
            self.stop_consumer(first, leaves=how == "leave")
        self.work(second)

    @precondition(lambda self: self.model.leases)
    @rule(name=consumers, late=st.booleans())
    def renew(self, name: str, late: bool) -> None:
        """Renew, and reclaim messages of others at the very end of their leases."""
        if late:
            self.advance(max(min(self.model.leases.values()) - self.now_ms, 0))
        dead = self.store.leases.renew("q", name, LEASE_MS)
        if name not in self.model.leases:
            assert dead is None
            return
        self.model.leases[name] = self.now_ms + LEASE_MS
        expected = {n for n, end_ms in self.model.leases.items() if end_ms <= self.now_ms}
        assert set(dead or ()) == expected
        for other in CONSUMERS:
            self.reclaim(other, lasts=other in self.model.leases and other not in expected)

    def reclaim(self, name: str, lasts: bool) -> None:
        if lasts:
            assert self.store.leases.reclaim("q", name) == 0
            return
        held, self.model.held[name] = self.model.held[name], {}
        assert self.store.leases.reclaim("q", name) == len(held)
        in_order = [each for _, each in sorted(held.items())]
        self.model.after_an_attempt(in_order, name, self.now_ms)
        self.past[name].update(held)
        self.model.leases.pop(name, None)
        # It may be dead, and its news lost with it.
        self.told[name] = Told(leased=self.told[name].leased)

    # All parties.

    @precondition(lambda self: self.bodies > 25)
    @rule()
    def purge(self) -> None:
        count = len(self.model.delayed) + sum(map(len, self.model.ready.values()))
        assert self.store.purge("q") == count
        self.model.delayed = {}
        self.model.ready = {step: [] for step in STEPS}

    @rule(by_ms=st.integers(0, 15) | st.sampled_from([10, 20, LEASE_MS, DEAD_MS]))
    def advance(self, by_ms: int) -> None:
        self.now_ms += by_ms
        self.store.now = str(self.now_ms)

    # Invariants.

    def server_delayed(self) -> dict[str, tuple[int, int]]:
        """Return body -> due time and step, of the backlog."""
        members = check_backlog(self.client)
        found = {}
        for member, record in records(self.client).items():
            kept = open_kept(record.encode())
            body = json.loads(kept.message)["body"]
            assert body not in found
            assert kept.due_ms == members[member]
            found[body] = kept.due_ms, kept.step
        return found

    def server_ready(self) -> list[str]:
        keys = self.store.keys("q")
        return [
            f"{step}{text.decode()}"
            for step, key in zip(STEPS, keys.ready, strict=True)
            for text in reversed(self.client.lrange(key, 0, -1))
        ]

    @invariant()
    def every_message_is_in_its_one_place(self) -> None:
        self.store.size("q")  # acks do not wait, but the next command does
        assert self.server_delayed() == {
            body: (each.due_ms, each.step) for body, each in self.model.delayed.items()
        }
        ready = [each for step in STEPS for each in self.model.ready[step]]
        self.check_records(self.server_ready(), ready)
        for name, held in self.model.held.items():
            tags = sorted(held)
            found = self.store.leases.recover("q", name, 0)
            assert [tag for tag, _ in found] == tags
            self.check_records([record.decode() for _, record in found], [held[t] for t in tags])

    @invariant()
    def dead_letters_are_known(self) -> None:
        ids = self.model.dead_ids
        assert self.store.dead.ids("q", 0, 1000) == ids
        assert self.store.dead.count("q") == len(ids)
        letters = self.store.dead.letters("q", ids)
        expected = [self.model.dead[id] for id in ids]
        assert letters == [
            DeadLetter(id, letter.message, b.reason, b.consumer, b.at_ms, b.deliveries)
            for id, letter, b in zip(ids, letters, expected, strict=True)
        ]
        found = records(self.client, of="dead-messages")
        assert found.keys() == records(self.client, of="dead-reasons").keys() == set(ids)
        self.check_records([found[id] for id in ids], [b.message for b in expected])

    def check_records(self, records: list[str], expected: list[Message]) -> None:
        assert [read(record)[:2] for record in records] == [(e.body, e.step) for e in expected]
        for record, each in zip(records, expected, strict=True):
            envelope = read(record)[2]
            assert envelope.get("due_ms") == each.was_promoted_at_due_ms
            assert envelope.get("deliveries") == each.deliveries

    @invariant()
    def sizes_are_true(self) -> None:
        ready = sum(map(len, self.model.ready.values()))
        due = sum((each.due_ms or 0) <= self.now_ms for each in self.model.delayed.values())
        assert self.store.size("q") == (ready, due, len(self.model.delayed))

    @invariant()
    def pages_and_forecasts_are_true(self) -> None:
        found = [each for page in self.backlog.pages(size=3) for each in page]
        due_times = [each.kept.due_ms for each in found]
        assert due_times == sorted(each.due_ms or 0 for each in self.model.delayed.values())
        bodies = {json.loads(each.kept.message)["body"] for each in found}
        assert bodies == set(self.model.delayed)
        edges = [self.now_ms, self.now_ms + 20]
        counts = [
            sum(low <= at < high for at in due_times)
            for low, high in zip([0, *edges], [*edges, 2**60], strict=True)
        ]
        assert self.backlog.forecast(edges) == counts

    @invariant()
    def leases_are_known(self) -> None:
        found = self.client.zrange("{q}:consumers", 0, -1, withscores=True)
        assert {name.decode(): end_ms for name, end_ms in found} == self.model.leases

    @invariant()
    def someone_comes_for_what_can_be_claimed(self) -> None:
        """There is a token, or a consumer with news. The promise alone binds no other consumer."""
        tokens = dict(self.client.zrange("{q}:wake", 0, -1, withscores=True))
        now_is_told = b"now" in tokens or any(told.now for told in self.told.values())
        if self.model.any_ready:
            assert now_is_told, "nobody comes for what is ready"
        earliest = self.model.earliest
        if earliest == math.inf:
            return
        first_at = min(tokens.get(b"due", math.inf), *(t.due_at for t in self.told.values()))
        is_due = earliest <= self.now_ms
        assert first_at <= earliest or (is_due and now_is_told), "nobody comes at the due time"

    @invariant()
    def nothing_is_left_over(self) -> None:
        keys = set(all_keys(self.client))
        assert not {key for key in keys if ":held:" in key}
        if not self.model.dead:
            assert not {key for key in keys if "dead" in key}
        if not self.model.delayed:
            assert not {key for key in keys if "delayed" in key}
            assert not {key for key in keys if key.startswith(("{q}:partitions", "{q}:messages"))}
        known = {id.decode(): int(n) for id, n in self.client.hgetall("{q}:duplicates").items()}
        numbers: dict[str, int] = {}
        for member in records(self.client):
            id, _, n = member.partition("\x1f")
            if n:
                numbers[id] = max(numbers.get(id, 0), int(n))
        assert known.keys() == numbers.keys()
        assert all(known[id] >= n for id, n in numbers.items())


def test_all_moves_in_any_order(client: redis.Redis, store: Store) -> None:
    machine = type("Machine", (StoreMachine,), {"client": client, "store": store})
    run_state_machine_as_test(machine, settings=CI)
