"""All moves in any order, with unique tasks and backups, and the events about them."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test

from kombu_delayed.inspection import events
from kombu_delayed.inspection.events import Event
from kombu_delayed.message.envelope import open_kept
from kombu_delayed.store.store import Entry, Store
from tests.kit.backlog import records
from tests.kit.restoring import restore, restore_dead
from tests.kit.state import message
from tests.properties.test_store_machine import (
    CI,
    DEAD_LIMITS,
    Buried,
    Message,
    StoreMachine,
    delays,
    ids,
    steps,
)

CONFLICTS = ["refuse", "replace", "debounce", "retry"]


@dataclass
class Holder:
    """The holder of a unique key: its name in the backlog and its last due time."""

    member: str
    due_ms: int


@dataclass
class Saved:
    """A message in a backup: its name in the backlog or among the dead, and how it was then."""

    member: str
    record: str
    message: Message


class KeyedMachine(StoreMachine):
    """Subclassed for each server."""

    @initialize(
        partition_size=st.integers(2, 5),
        bucket_bytes=st.sampled_from([1, 1_000_000]),
        max_deliveries=st.integers(0, 3),
        dead_limit=st.sampled_from(DEAD_LIMITS),
    )
    def begin(
        self, partition_size: int, bucket_bytes: int, max_deliveries: int, dead_limit: int
    ) -> None:
        self.store.event_limit = 1_000_000
        self.headers: dict[str, Any] = {}
        self.holders: dict[str, Holder] = {}
        self.key_of: dict[str, str] = {}
        self.backlog_saved: list[Saved] = []
        self.dead_saved: list[tuple[Saved, Buried, str]] = []
        self.refused: set[str] = set()
        #: Bodies that were purged, or restored among the dead: no event reports these.
        self.dropped: set[str] = set()
        self.raised: set[str] = set()
        super().begin(partition_size, bucket_bytes, max_deliveries, dead_limit)

    def entry(self, id: str, step: int, due: str) -> tuple[Entry, Message]:
        """The tenant distinguishes the events of messages that share an id."""
        self.bodies += 1
        body = f"{self.bodies}"
        headers = {"id": id, "tenant": f"t{body}", **self.headers}
        entry = Entry(id, step, message(body, headers=headers), due)
        return entry, Message(body, step, id, entry=entry, waits_as=id)

    def messages(self) -> dict[str, dict[str, Any]]:
        """Member of the backlog -> message."""
        return {
            member: json.loads(open_kept(record.encode()).message)
            for member, record in records(self.client).items()
        }

    def members(self) -> dict[str, str]:
        """Member of the backlog -> body."""
        return {member: each["body"] for member, each in self.messages().items()}

    def member_of(self, body: str) -> str:
        return next(member for member, each in self.members().items() if each == body)

    def whereabouts(self) -> dict[str, str]:
        """Body -> state."""
        model = self.model
        found = {each.body: "delayed" for each in model.delayed.values()}
        found |= {each.body: "ready" for each in itertools.chain(*model.ready.values())}
        held = itertools.chain(*(each.values() for each in model.held.values()))
        found |= {each.body: "unacked" for each in held}
        return found | {each.message.body: "dead" for each in model.dead.values()}

    # Unique tasks.

    @rule(
        key=st.sampled_from(["k", "l"]),
        id=ids,
        step=steps,
        delay=delays | st.integers(-20, 0),
        conflict=st.sampled_from(CONFLICTS),
    )
    def schedule_unique(self, key: str, id: str, step: int, delay: int, conflict: str) -> None:
        there = self.members()
        self.forget_past(there)
        holder = self.holders.get(key)
        other = self.model.delayed[there[holder.member]] if self.is_held(key, there) else None
        due_ms = self.now_ms + delay
        self.headers = {"delayed_unique": key, "retries": int(conflict == "retry")}
        entry, each = self.entry(id, step, str(due_ms))
        self.headers = {}
        each.due_ms = due_ms
        answer = self.store.schedule_unique("q", entry, key, conflict)
        name = holder.member if holder and other else ""
        if conflict == "retry":
            assert answer == ("stored", "")
            if holder and holder.member == id:
                del self.holders[key]
            self.arrive(each)
        elif other and conflict == "refuse":
            assert answer == ("refused", name)
            self.refused.add(each.body)
        elif other and conflict == "debounce":
            assert answer == ("pushed", name)
            self.refused.add(each.body)
            other.due_ms = due_ms
            if due_ms <= self.now_ms:
                other.was_promoted_at_due_ms = due_ms
            self.arrive(other, key)
        else:
            assert answer == (("replaced", name) if other else ("stored", ""))
            if other:
                del self.model.delayed[other.body]
            self.key_of[each.body] = key
            self.arrive(each, key)

    def arrive(self, each: Message, key: str | None = None) -> None:
        """Add it to the backlog, with its key if any, or to the ready messages if it is due."""
        due_ms = each.due_ms or 0
        if due_ms > self.now_ms:
            self.model.delayed[each.body] = each
            if key:
                self.holders[key] = Holder(self.member_of(each.body), due_ms)
            return
        self.model.delayed.pop(each.body, None)
        each.due_ms = each.entry = None
        self.model.ready[each.step].append(each)
        if key:
            self.holders.pop(key, None)

    def is_held(self, key: str, there: dict[str, str]) -> bool:
        return key in self.holders and self.holders[key].member in there

    def forget_past(self, there: dict[str, str]) -> None:
        for key, holder in [*self.holders.items()]:
            if holder.due_ms <= self.now_ms:
                if holder.member in there:
                    holder.due_ms = self.model.delayed[there[holder.member]].due_ms or 0
                else:
                    del self.holders[key]

    @contextmanager
    def leaving_early(self) -> Iterator[None]:
        before = self.messages()
        yield
        for member in before.keys() - self.members().keys():
            key = before[member]["headers"].get("delayed_unique")
            if key in self.holders and self.holders[key].member == member:
                del self.holders[key]

    # Backups.

    @precondition(lambda self: self.model.delayed or self.model.dead)
    @rule()
    def back_up(self) -> None:
        found = records(self.client)
        self.backlog_saved = [
            Saved(member, found[member], replace(self.model.delayed[body]))
            for member, body in sorted(self.members().items())
        ]
        found = records(self.client, of="dead-messages")
        notes = records(self.client, of="dead-reasons")
        self.dead_saved = []
        for member, letter in self.model.dead.items():
            saved = Saved(member, found[member], replace(letter.message))
            self.dead_saved.append((saved, replace(letter), notes[member]))

    @precondition(lambda self: self.backlog_saved)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        """Restores messages that are gone or still delayed; others would get a second life."""
        chosen = data.draw(st.lists(st.sampled_from(self.backlog_saved), unique_by=id, max_size=4))
        for saved in chosen:
            there, where = self.members(), self.whereabouts()
            body = saved.message.body
            if body in where and there.get(saved.member) != body:
                continue
            if body in where and not self.has_its_text(saved):
                continue
            counts = (0, 1) if body in where else (1, 0)
            assert restore(self.store, [(saved.member, saved.record)]) == counts
            if body not in where:
                self.restored(saved)
            assert restore(self.store, [(self.member_of(body), saved.record)]) == (0, 1)

    def has_its_text(self, saved: Saved) -> bool:
        """False if the text has changed: it may have been delivered and parked since."""
        now = open_kept(records(self.client)[saved.member].encode())
        return now.message == open_kept(saved.record.encode()).message

    def restored(self, saved: Saved) -> None:
        due_ms = open_kept(saved.record.encode()).due_ms
        id = saved.member.partition("\x1f")[0]
        each = replace(saved.message, due_ms=due_ms, entry=None, waits_as=id)
        self.model.delayed[each.body] = each
        key = self.key_of.get(each.body, "")
        there = self.members()
        there.pop(self.member_of(each.body))
        if key and not self.is_held(key, there):
            self.holders[key] = Holder(self.member_of(each.body), due_ms)

    @precondition(lambda self: self.dead_saved)
    @rule(data=st.data())
    def restore_dead(self, data: st.DataObject) -> None:
        saved, letter, note = data.draw(st.sampled_from(self.dead_saved))
        where = self.whereabouts()
        body = saved.message.body
        now = self.model.dead.get(saved.member)
        if body in where and not (now and now.message.body == body):
            return
        there = records(self.client, of="dead-messages")
        if body in where and there.get(saved.member) != saved.record:
            return
        row = (saved.member, letter.at_ms, saved.record, note)
        assert restore_dead(self.store, [row]) == ((0, 1) if body in where else (1, 0))
        assert restore_dead(self.store, [row]) == (0, 1)
        if body not in where:
            id = saved.member.partition("\x1f")[0]
            names = itertools.chain([saved.member], (f"{id}\x1f{n}" for n in itertools.count(2)))
            name = next(name for name in names if name not in self.model.dead)
            self.model.dead[name] = replace(letter, message=replace(saved.message))
            self.raised.add(body)

    # Invariants.

    @precondition(lambda self: self.bodies > 25)
    @rule()
    def purge(self) -> None:
        before = self.whereabouts()
        super().purge()
        self.dropped |= before.keys() - self.whereabouts().keys()
        self.holders.clear()

    @invariant()
    def keys_have_their_holders(self) -> None:
        found = {
            key.decode(): member.decode()
            for key, member in self.client.hgetall("{q}:unique").items()
        }
        assert found == {key: holder.member for key, holder in self.holders.items()}
        assert self.client.zcard("{q}:unique-due") == len(found)

    @invariant()
    def events_are_a_life(self) -> None:
        lives: dict[str, list[Event]] = defaultdict(list)
        for event in events.read(self.store, "q", count=1_000_000):
            lives[event.tenant.removeprefix("t")].append(event)
        where = self.whereabouts()
        for n in range(1, self.bodies + 1):
            self.check_life(f"{n}", lives.pop(f"{n}", []), where.get(f"{n}", "gone"))
        assert not lives

    def check_life(self, body: str, life: list[Event], state: str) -> None:
        at = {"sent"}
        if body in self.refused:
            at = {"gone"}
        for event in life:
            legal, (before, after) = at | self.silently(at, body), EVENTS[event.event]
            assert legal & before, f"{body}: {event.event} after {at}"
            at = after
        assert state in at | self.silently(at, body), f"{body}: {state}, but told {life}"
        timed = [event for event in life if event.event in ("scheduled", "rescheduled", "replayed")]
        if state == "delayed":
            assert timed[-1].due_ms == self.model.delayed[body].due_ms

    def silently(self, at: set[str], body: str) -> set[str]:
        """The places where it can be without an event."""
        found = set()
        if at & {"sent", "delayed"}:
            found.add("ready")
        if "dead" in at or body in self.dropped:  # dead letters are bounded
            found.add("gone")
        if body in self.raised:
            found |= {"dead", "gone"}
        return found


#: The states of a message before and after each event.
EVENTS = {
    "scheduled": ({"sent", "gone", "unacked"}, {"delayed"}),
    "rescheduled": ({"delayed"}, {"delayed"}),
    "cancelled": ({"delayed"}, {"gone"}),
    "delivered": ({"ready"}, {"unacked"}),
    "acked": ({"unacked"}, {"gone"}),
    "released": ({"unacked"}, {"ready"}),
    "reclaimed": ({"unacked"}, {"ready"}),
    "buried": ({"unacked"}, {"dead"}),
    "replayed": ({"dead"}, {"ready", "delayed"}),
}


def test_unique_tasks_and_backups_among_all_moves(client: redis.Redis, store: Store) -> None:
    machine = type("Machine", (KeyedMachine,), {"client": client, "store": store})
    run_state_machine_as_test(machine, settings=settings(CI, max_examples=40))
