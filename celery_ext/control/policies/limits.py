"""Limits and tenants of a queue, for display."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from kombu_delayed.inspection.gate_usage import (
    Room,
    holders,
    known_as,
    parts_of,
    room,
    turns,
    waiting_count,
)
from kombu_delayed.message.ticket import plain, slot_name
from kombu_delayed.store.policies.overrides import Override

from ...app.queues import Queues
from ...tasks.times import from_ms
from .limit_usage import Declarations, GateUsage, LimitUsage, place_of

if TYPE_CHECKING:
    from ...policies.limits.gated import Declared
    from ...policies.limits.throttler import RunningTask

#: How many keys of a limit are shown.
BUSIEST = 5

NOTHING = LimitUsage()


@dataclass(frozen=True)
class KeyInfo:
    """A key of a limit. `tokens` can be spent now, if it has a rate; `slots` are those of a share.

    A number is None if it is not counted, or not visible to the caller.
    """

    key: str
    in_use: int | None
    waiting: int
    first_due: datetime | None
    tokens: float | None = None
    slots: int | None = None


@dataclass(frozen=True)
class LimitInfo:
    """A limit of a queue: its capacity for each key, its use and waiting messages over all keys.

    `keys` is the number of keys that are in use or waited for, or None if it has no keys.
    `declared` is False for a limit that the app does not know, so that its capacity is unknown.
    """

    queue: str
    name: str
    kind: str
    task: str | None
    by: str | None
    capacity: int | None
    rate: str | None
    burst: int | None
    after_seconds: float | None
    critical: bool
    declared: bool
    in_use: int | None
    tokens: float | None
    waiting: int
    first_due: datetime | None
    keys: int | None
    busiest: tuple[KeyInfo, ...] = ()
    shares: tuple[KeyInfo, ...] = ()
    #: Whether `capacity`, `rate` or `burst` were set at run time: by whom, why, until when (None:
    #: without end), and the declared values.
    overridden: bool = False
    set_by: str | None = None
    set_why: str | None = None
    set_until: datetime | None = None
    declared_capacity: int | None = None
    declared_rate: str | None = None


@dataclass(frozen=True)
class WaitInfo:
    """How many messages wait for a limit, or one of its keys; without a limit, for their turn."""

    limit: str | None
    key: str | None
    waiting: int


@dataclass(frozen=True)
class UseInfo:
    """A tenant's usage of a limit for each tenant."""

    limit: str
    capacity: int | None
    in_use: int


@dataclass(frozen=True)
class TenantInfo:
    """A tenant with messages at the gate of a queue, or with slots of its limits for each tenant.

    `turn` is 1 if its turn is next in any shard of the queue. It is None if the tenant waits for no
    turn, or the queue has no turns.
    """

    tenant: str
    queue: str
    waiting: int
    first_due: datetime | None
    weight: float | None
    turn: int | None
    waits_for: tuple[WaitInfo, ...]
    in_use: tuple[UseInfo, ...]


def gate_usage(delayed: Queues, queue: str, tenants: Collection[str] = ()) -> GateUsage:
    """Slots in use and messages that wait at the gate of a queue, for some tenants or for all."""
    declarations = Declarations.of(delayed, queue)
    shards = delayed.store.shards.all(queue)
    found: dict[str, Override] = {}
    for place in {place_of(each, queue) for each in declarations.every}:
        found |= delayed.store.overrides.of(place)
    is_empty = declarations.is_empty and not found
    if is_empty and not any(waiting_count(delayed.store, each) for each in shards):
        return GateUsage(queue, declarations)
    usage = GateUsage.read(delayed.store, queue, declarations.with_overrides(found), tenants)
    usage.overrides, usage.as_declared = found, declarations
    return usage


def limits(delayed: Queues, usage: GateUsage) -> list[LimitInfo]:
    """The limits of a queue by name: those that are declared for it, and all that are in use."""
    known = {each.known_as: each for each in usage.declarations.of_other_queues}
    shown = {each.known_as: each for each in usage.declarations.limits}
    shown |= {name: each for name, each in known.items() if plain(each.name) in usage.overrides}
    shares = {name for each in (*shown.values(), *known.values()) for name in _share_names(each)}
    for name in usage.limits:
        if name not in shown and name not in shares:
            shown[name] = known.get(name) or _undeclared(name)
    found = [_limit(delayed, usage, shown[name]) for name in sorted(shown)]
    return [each for each in found if each.declared or each.in_use or each.waiting]


def limit(delayed: Queues, usage: GateUsage, name: str) -> LimitInfo | None:
    """The limit with this name, or None."""
    return next((each for each in limits(delayed, usage) if each.name == name), None)


def names_of(usage: GateUsage, name: str) -> list[str]:
    """The names that lanes use for a limit, and for the limits that it consists of."""
    declared = _declared(usage, name)
    return [declared.known_as, *_share_names(declared)]


def _declared(usage: GateUsage, name: str) -> Declared:
    return usage.declarations.named(name) or _undeclared(name)


def _undeclared(name: str) -> Declared:
    from ...policies.limits.gated import Declared

    return Declared(name, "undeclared")


def _share_names(declared: Declared) -> list[str]:
    if declared.kind != "shares":
        return []
    return [known_as(declared.of_key(key)[0]) for key in declared.shares]


def _limit(delayed: Queues, usage: GateUsage, each: Declared) -> LimitInfo:
    by_key = usage.limits.get(each.known_as, {})
    shares = _shares(usage, each)
    has_keys = (bool(each.by) or each.kind == "undeclared") and each.kind != "shares"
    busiest = [key for key, _ in _busiest(by_key)][:BUSIEST] if has_keys else [""]
    found = _keys(delayed, usage, each, busiest)
    waiting = [used for used in by_key.values() if used.waiting] + _waiting_for_shares(usage, each)
    in_use = sum(used.in_use for used in by_key.values())
    return LimitInfo(
        usage.queue,
        each.name,
        each.kind,
        each.task or None,
        each.by or None,
        each.slots,
        each.rate or None,
        each.burst if each.rate else None,
        each.after_ms / 1000 if each.kind == "drain" else None,
        each.has_critical,
        each.kind != "undeclared",
        in_use if _is_counted(usage, each) else None,
        None if has_keys else found[0].tokens,
        sum(used.waiting for used in waiting),
        _moment(min((used.first_due_ms for used in waiting if used.waiting), default=0)),
        len(by_key) if has_keys else None,
        tuple(found) if has_keys else (),
        shares,
        **_set(usage, each),
    )


def _set(usage: GateUsage, each: Declared) -> dict[str, Any]:
    found = usage.overrides.get(plain(each.name))
    declared = usage.as_declared.named(each.name) if usage.as_declared else None
    if found is None or declared is None or not declared.is_settable:
        return {}
    return {
        "overridden": True,
        "set_by": found.by,
        "set_why": found.why,
        "set_until": _moment(found.until_ms),
        "declared_capacity": declared.slots,
        "declared_rate": declared.rate or None,
    }


def _busiest(by_key: dict[str, LimitUsage]) -> list[tuple[str, LimitUsage]]:
    return sorted(by_key.items(), key=lambda each: (-each[1].waiting, -each[1].in_use, each[0]))


def _is_counted(usage: GateUsage, each: Declared) -> bool:
    """Returns whether the use of a limit is known, and visible to the caller."""
    if usage.tenants_only and (not each.is_of_tenants or each.kind == "shares"):
        return False
    return each.slots is not None or each.kind in ("throttler", "undeclared")


def _waiting_for_shares(usage: GateUsage, each: Declared) -> list[LimitUsage]:
    return [
        used
        for name in _share_names(each)
        if (used := usage.limits.get(name, {}).get("")) and used.waiting
    ]


def _shares(usage: GateUsage, each: Declared) -> tuple[KeyInfo, ...]:
    found = []
    for key, slots in each.shares.items():
        if usage.tenants_only and known_as(key) not in usage.tenants_only:
            continue
        limit, _ = each.of_key(key)
        by_key = usage.limits.get(known_as(limit), {})
        used = by_key.get("", NOTHING)
        # Keys that borrow take turns, and are not counted separately.
        in_use = None if usage.declarations.turns_by else used.in_use
        found.append(KeyInfo(key, in_use, used.waiting, _moment(used.first_due_ms), None, slots))
    return tuple(found)


def running(delayed: Queues, queue: str, limit: int) -> list[RunningTask]:
    """At most `limit` running tasks that have slots in a queue, as a `Throttler` sees them."""
    from ...policies.limits.throttler import RunningTask

    found: list[RunningTask] = []
    for shard in delayed.store.shards.all(queue):
        held = holders(delayed.store, shard, limit - len(found))
        found += [RunningTask.of(queue, each) for each in held]
        if len(found) >= limit:
            break
    return found


def keys_page(
    delayed: Queues,
    usage: GateUsage,
    name: str,
    size: int,
    words: str = "",
    after: tuple[int, int, str] | None = None,
) -> tuple[list[KeyInfo], tuple[int, int, str] | None]:
    """Keys of a limit that contain `words`, those with the most waiting messages first.

    Also returns the `after` of the next page, or None at the end.
    """
    by_key = usage.limits.get(known_as(name), {})
    place = (-after[0], -after[1], after[2]) if after else None
    found = [
        (key, used)
        for key, used in _busiest(by_key)
        if words in key and (place is None or (-used.waiting, -used.in_use, key) > place)
    ]
    names = [key for key, _ in found[:size]]
    shown = _keys(delayed, usage, _declared(usage, name), names)
    if len(found) <= size:
        return shown, None
    key, used = found[size - 1]
    return shown, (used.waiting, used.in_use, key)


def _keys(delayed: Queues, usage: GateUsage, each: Declared, keys: Sequence[str]) -> list[KeyInfo]:
    by_key = usage.limits.get(each.known_as, {})
    is_hidden = bool(usage.tenants_only) and not each.is_of_tenants
    names = {key: slot_name(each.name, key) for key in keys}
    now_ms, found = 0, dict[str, Room]()
    if each.every_ms and not is_hidden:
        now_ms, found = room(delayed.store, usage.queue, names.values())
    is_counted = _is_counted(usage, each)
    return [
        KeyInfo(
            key,
            used.in_use if is_counted else None,
            used.waiting,
            _moment(used.first_due_ms),
            _tokens(each, found[names[key]], now_ms) if found else None,
        )
        for key in keys
        for used in (by_key.get(key, NOTHING),)
    ]


def _tokens(each: Declared, found: Room, now_ms: int) -> float:
    """The tokens that can be spent now."""
    ahead_ms = max(found.until_ms - now_ms, 0)
    return round(min(max(each.burst - ahead_ms / each.every_ms, 0), each.burst), 2)


def tenants(delayed: Queues, usage: GateUsage, names: Iterable[str]) -> list[TenantInfo]:
    """Some tenants of a queue, given by their names in `lanes`."""
    wanted, found = list(names), dict[str, int]()
    if usage.declarations.turns_are_of_tenants:
        for shard in delayed.store.shards.all(usage.queue):
            for name, turn in turns(delayed.store, shard, wanted).items():
                found[name] = min(turn, found.get(name, turn))
    return [_tenant(usage, name, found.get(name)) for name in wanted]


def _tenant(usage: GateUsage, name: str, turn: int | None) -> TenantInfo:
    used = usage.tenants[name]
    is_fair = usage.declarations.turns_are_of_tenants and used.waiting
    return TenantInfo(
        name,
        usage.queue,
        used.waiting,
        _moment(used.first_due_ms),
        used.weight if is_fair else None,
        None if turn is None else turn + 1,
        tuple(_wait(usage, *each) for each in sorted(used.waits_for.items(), key=_most)),
        tuple(_uses(usage, name)),
    )


def _uses(usage: GateUsage, tenant: str) -> Iterator[UseInfo]:
    for each in usage.declarations.of_tenants:
        if each.slots is not None or each.kind == "throttler":
            limit, key = each.of_key(tenant)
            used = usage.limits.get(known_as(limit), {}).get(key, NOTHING)
            is_here = each in usage.declarations.limits
            if used.in_use or (is_here and each.kind == "limit"):
                capacity = each.shares.get(tenant, each.slots)
                yield UseInfo(each.name, capacity, used.in_use)


def _most(each: tuple[str, int]) -> tuple[int, str]:
    return -each[1], each[0]


def _wait(usage: GateUsage, name: str, count: int) -> WaitInfo:
    limit, key = usage.named(*parts_of(name)) if name else ("", "")
    return WaitInfo(limit or None, key or None, count)


def _moment(at_ms: int) -> datetime | None:
    return from_ms(at_ms) if at_ms else None
