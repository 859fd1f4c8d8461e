"""The usage of a queue's gate: its limits, their slots in use, and the messages that wait."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kombu_delayed.inspection.gate_usage import (
    Lane,
    first_ids,
    known_as,
    lanes,
    of_key,
    of_slot,
    parts_of,
    room,
    slots,
)
from kombu_delayed.message.ticket import plain, slot_name
from kombu_delayed.store.global_limits import pool_of
from kombu_delayed.store.policies.overrides import Override
from kombu_delayed.store.store import Store

from ...app.queues import Queues, routed_queue
from .declared import rules_for

if TYPE_CHECKING:
    from ...policies.limits.gated import Declared

#: How many lanes one reading covers, some per call.
LANES_LIMIT = 200_000

#: How many lanes of a limit are kept by name, and how many of their messages are read.
FIRST = 20


@dataclass(frozen=True)
class Declarations:
    """The declarations for the gate of a queue. `turns_by` is what turns depend on, "" for none.

    The limits of a task belong to the queue that Celery sends it to.
    """

    limits: tuple[Declared, ...] = ()
    of_other_queues: tuple[Declared, ...] = ()
    turns_by: str = ""
    turns_are_of_tenants: bool = False

    @classmethod
    def of(cls, delayed: Queues, queue: str) -> Declarations:
        """The declarations of a queue. Raises PolicyError if they are invalid."""
        rules = rules_for(delayed, queue)
        if rules is None:
            return cls()
        from ...policies.limits.gated import is_tenant  # declaring rules imports them
        from ...policies.limits.keys import by_text

        gated = rules.gated(queue)
        own: list[Declared] = []
        others: list[Declared] = []
        for owner, policy in gated:
            is_here = not owner or routed_queue(delayed.app, owner) == queue
            (own if is_here else others).extend(policy.declared(owner))
        turns = next((policy.turns_by for _, policy in gated if policy.turns_by), None)
        return cls(
            tuple({each.name: each for each in own}.values()),
            tuple(others),
            by_text(turns),
            is_tenant(turns),
        )

    def with_overrides(self, found: Mapping[str, Override]) -> Declarations:
        """The same with the numbers that apply now."""
        if not found:
            return self

        def now(some: tuple[Declared, ...]) -> tuple[Declared, ...]:
            return tuple(_overridden(each, found.get(plain(each.name))) for each in some)

        return replace(self, limits=now(self.limits), of_other_queues=now(self.of_other_queues))

    def named(self, name: str) -> Declared | None:
        """A limit by its name. One of a task applies in every queue that the task is sent to."""
        return next((each for each in self.every if each.name == name), None)

    @property
    def every(self) -> tuple[Declared, ...]:
        """All limits, including those of tasks that Celery sends elsewhere."""
        return (*self.limits, *self.of_other_queues)

    @property
    def is_empty(self) -> bool:
        """Returns whether nothing is declared for the queue."""
        return not self.limits and not self.turns_by

    def patterns(self, tenant: str) -> list[str]:
        """Patterns of the lanes that may belong to a tenant."""
        shares = (each for each in self.of_tenants if each.kind == "shares")
        return [of_key(tenant), *(of_slot(slot_name(*each.of_key(tenant))) for each in shares)]

    @cached_property
    def of_tenants(self) -> list[Declared]:
        """Limits whose keys are tenants, including those of tasks that have another queue."""
        return [each for each in self.every if each.is_of_tenants]

    def tenant_of(self, lane: Lane) -> str:
        """The tenant whose messages are in a lane, or "" if unknown."""
        if self.turns_are_of_tenants and (key := lane.turn[0]):
            return key
        for each in self.of_tenants:
            for use in lane.uses:
                if tenant := each.key_in(use.limit, use.key):
                    return tenant
        return ""


def place_of(each: Declared, queue: str) -> str:
    """Where the use of a limit is stored, and the numbers that were set for it at run time."""
    return pool_of(plain(each.name)) if each.is_global else queue


def _overridden(each: Declared, found: Override | None) -> Declared:
    if found is None or not each.is_settable:
        return each
    changes: dict[str, Any] = {}
    if each.slots and found.slots:
        changes["slots"] = found.slots
    if each.every_ms and found.every_ms:
        changes |= {"every_ms": found.every_ms, "rate": found.rate}
    if each.every_ms and found.burst:
        changes["burst"] = found.burst
    return replace(each, **changes)


@dataclass(slots=True)
class LimitUsage:
    """How many messages wait, when the first one was due, and how much is in use."""

    waiting: int = 0
    first_due_ms: int = 0
    in_use: int = 0

    def add(self, lane: Lane) -> None:
        self.waiting += lane.size
        self.first_due_ms = min(self.first_due_ms or lane.first_due_ms, lane.first_due_ms)


@dataclass(slots=True)
class TenantUsage(LimitUsage):
    """The usage of a tenant, with how many messages wait for each limit, as slots name it."""

    weight: float = 1.0
    waits_for: dict[str, int] = field(default_factory=dict)


@dataclass
class GateUsage:
    """One reading. Names and keys are as in `lanes`; `limits` is by name and then by key.

    A reading for some `tenants` leaves out what belongs to others. `is_complete` is False if more
    lanes wait than one reading covers.
    """

    queue: str
    declarations: Declarations
    tenants_only: frozenset[str] = frozenset()
    limits: dict[str, dict[str, LimitUsage]] = field(default_factory=dict)
    tenants: dict[str, TenantUsage] = field(default_factory=dict)
    turn: LimitUsage = field(default_factory=LimitUsage)
    first: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    is_complete: bool = True
    #: The numbers that were set for its limits at run time, by their names as in lanes.
    overrides: dict[str, Override] = field(default_factory=dict)
    #: The declarations without these numbers, if the gate was read.
    as_declared: Declarations | None = None

    @cached_property
    def busiest(self) -> list[tuple[int, str]]:
        """The negative number of waiting messages and the name of each tenant, sorted."""
        return sorted((-used.waiting, name) for name, used in self.tenants.items())

    @classmethod
    def read(
        cls, store: Store, queue: str, declarations: Declarations, tenants: Collection[str] = ()
    ) -> GateUsage:
        """The usage now, read in bounded calls."""
        found = cls(queue, declarations, frozenset(map(known_as, tenants)))
        if tenants:
            found._read_tenants(store, tenants)
        else:
            found._read_all(store)
        return found

    def _read_all(self, store: Store) -> None:
        shards = store.shards.all(self.queue)
        for shard in shards:
            self._read_lanes(store, shard)
        pools = {place_of(each, self.queue) for each in self.declarations.limits if each.is_global}
        for place in (*shards, *sorted(pools)):
            for counts in slots(store, place):
                self._use(counts)

    def _read_lanes(self, store: Store, shard: str) -> None:
        seen = set[str]()
        for page in lanes(store, shard):
            self._add({each.name: each for each in page if each.name not in seen}.values())
            seen.update(each.name for each in page)
            if len(seen) >= LANES_LIMIT:
                self.is_complete = False
                break

    def _read_tenants(self, store: Store, tenants: Collection[str]) -> None:
        tenant_of = self.declarations.tenant_of
        for tenant in tenants:
            mine = known_as(tenant)
            patterns = self.declarations.patterns(tenant)
            for shard in store.shards.all(self.queue):
                pages = (page for pattern in patterns for page in lanes(store, shard, pattern))
                found = {lane.name: lane for page in pages for lane in page}
                self._add(lane for lane in found.values() if tenant_of(lane) == mine)
        names: dict[str, list[str]] = {}
        for each in self.declarations.of_tenants:
            place = names.setdefault(place_of(each, self.queue), [])
            place += [slot_name(*each.of_key(tenant)) for tenant in tenants]
        for kept_at, of_place in names.items():
            _, found_room = room(store, kept_at, of_place)
            self._use({name: each.slots for name, each in found_room.items() if each.slots})

    def _add(self, found: Iterable[Lane]) -> None:
        for lane in found:
            used = self._usage(lane.limit) if lane.limit else self.turn
            used.add(lane)
            first = self.first.setdefault(lane.limit.partition(":")[0], [])
            heapq.heappush(first, (-lane.first_due_ms, lane.name))
            if len(first) > FIRST:
                heapq.heappop(first)
            if tenant := self.declarations.tenant_of(lane):
                own = self.tenants.setdefault(tenant, TenantUsage())
                own.add(lane)
                own.weight = lane.turn[1]
                own.waits_for[lane.limit] = own.waits_for.get(lane.limit, 0) + lane.size

    def _use(self, counts: dict[str, int]) -> None:
        for name, count in counts.items():
            self._usage(name).in_use = count
            for each in self.declarations.of_tenants:
                if tenant := each.key_in(*parts_of(name)):
                    used = self.tenants.setdefault(tenant, TenantUsage())
                    used.in_use = max(used.in_use, count)

    def _usage(self, slot: str) -> LimitUsage:
        limit, key = parts_of(slot)
        return self.limits.setdefault(limit, {}).setdefault(key, LimitUsage())

    def first_ids(self, store: Store, limits: Iterable[str]) -> list[str]:
        """Messages that wait for limits, the first due ones first, as the backlog names them."""
        found = sorted(each for name in limits for each in self.first.get(plain(name), ()))
        names = [name for _, name in found[-FIRST:]]
        shards = store.shards.all(self.queue)
        return [id for each in shards for id in first_ids(store, each, names, FIRST)][:FIRST]

    def named(self, limit: str, key: str) -> tuple[str, str]:
        """The declared names of a limit and its key, given as lanes name them."""
        for each in self.declarations.every:
            if (found := each.key_in(limit, key)) is not None:
                return each.name, found
        return limit, key
