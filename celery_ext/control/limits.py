"""Limits and tenants of a queue, as they are shown."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from kombu_delayed.inspection.gate_usage import Room, known_as, parts_of, room, turns, waiting_count
from kombu_delayed.message.ticket import slot_name

from ..app.queues import Queues
from ..tasks.times import from_ms
from .limit_usage import Declarations, Line, Standing

if TYPE_CHECKING:
    from ..policies.limits.gated import Declared

#: Keys that a limit is shown with.
BUSIEST = 5

NOTHING = Line()


@dataclass(frozen=True)
class KeyInfo:
    """A key of a limit. `tokens` may be spent now, where it has a rate; `slots` are a share's.

    None is what is not counted, or not for who asks.
    """

    key: str
    in_use: int | None
    waiting: int
    first_due: datetime | None
    tokens: float | None = None
    slots: int | None = None


@dataclass(frozen=True)
class LimitInfo:
    """A limit of a queue: how much there is for each key, and in use and waiting over all keys.

    `keys` is how many are in use or waited for, None where it has none. `declared` is False for one
    that the app does not know: how much there is of it is not known then.
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


@dataclass(frozen=True)
class WaitInfo:
    """How many messages wait for a limit, of a key where it has some; None: for their turn."""

    limit: str | None
    key: str | None
    waiting: int


@dataclass(frozen=True)
class UseInfo:
    """What a tenant has of a limit for each."""

    limit: str
    capacity: int | None
    in_use: int


@dataclass(frozen=True)
class TenantInfo:
    """A tenant with messages at the gate of a queue, or with slots of its limits for each tenant.

    `turn` is 1 where its turn is next; None where it waits for no turn, or there are none.
    """

    tenant: str
    queue: str
    waiting: int
    first_due: datetime | None
    weight: float | None
    turn: int | None
    waits_for: tuple[WaitInfo, ...]
    in_use: tuple[UseInfo, ...]


def stand(delayed: Queues, queue: str, tenants: Collection[str] = ()) -> Standing:
    """How it stands at the gate of a queue, for some tenants or for all."""
    declarations = Declarations.of(delayed, queue)
    if declarations.is_empty and not waiting_count(delayed.store, queue):
        return Standing(queue, declarations)
    return Standing.read(delayed.store, queue, declarations, tenants)


def limits(delayed: Queues, standing: Standing) -> list[LimitInfo]:
    """The limits of a queue by name: those that are declared for it, and all that are in use."""
    known = {each.known_as: each for each in standing.declarations.of_other_queues}
    shown = {each.known_as: each for each in standing.declarations.limits}
    shares = {name for each in (*shown.values(), *known.values()) for name in _share_names(each)}
    for name in standing.limits:
        if name not in shown and name not in shares:
            shown[name] = known.get(name) or _undeclared(name)
    found = [_limit(delayed, standing, shown[name]) for name in sorted(shown)]
    return [each for each in found if each.declared or each.in_use or each.waiting]


def limit(delayed: Queues, standing: Standing, name: str) -> LimitInfo | None:
    """One of them; None: there is none of this name."""
    return next((each for each in limits(delayed, standing) if each.name == name), None)


def names_of(standing: Standing, name: str) -> list[str]:
    """What lanes call a limit, and those that it is made of."""
    declared = _declared(standing, name)
    return [declared.known_as, *_share_names(declared)]


def _declared(standing: Standing, name: str) -> Declared:
    of_all = (*standing.declarations.limits, *standing.declarations.of_other_queues)
    return next((each for each in of_all if each.name == name), None) or _undeclared(name)


def _undeclared(name: str) -> Declared:
    from ..policies.limits.gated import Declared

    return Declared(name, "undeclared")


def _share_names(declared: Declared) -> list[str]:
    if declared.kind != "shares":
        return []
    return [known_as(declared.of_key(key)[0]) for key in declared.shares]


def _limit(delayed: Queues, standing: Standing, each: Declared) -> LimitInfo:
    lines = standing.limits.get(each.known_as, {})
    shares = _shares(standing, each)
    has_keys = (bool(each.by) or each.kind == "undeclared") and each.kind != "shares"
    busiest = [key for key, _ in _busiest(lines)][:BUSIEST] if has_keys else [""]
    found = _keys(delayed, standing, each, busiest)
    waiting = [line for line in lines.values() if line.waiting] + _lines_of_shares(standing, each)
    in_use = sum(line.in_use for line in lines.values())
    return LimitInfo(
        standing.queue,
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
        in_use if _is_counted(standing, each) else None,
        None if has_keys else found[0].tokens,
        sum(line.waiting for line in waiting),
        _moment(min((line.first_due_ms for line in waiting if line.waiting), default=0)),
        len(lines) if has_keys else None,
        tuple(found) if has_keys else (),
        shares,
    )


def _busiest(lines: dict[str, Line]) -> list[tuple[str, Line]]:
    return sorted(lines.items(), key=lambda each: (-each[1].waiting, -each[1].in_use, each[0]))


def _is_counted(standing: Standing, each: Declared) -> bool:
    """Whether what is in use of it is known, and is for who asks."""
    if standing.tenants_only and (not each.is_of_tenants or each.kind == "shares"):
        return False
    return each.slots is not None or each.kind in ("throttler", "undeclared")


def _lines_of_shares(standing: Standing, each: Declared) -> list[Line]:
    return [
        line
        for name in _share_names(each)
        if (line := standing.limits.get(name, {}).get("")) and line.waiting
    ]


def _shares(standing: Standing, each: Declared) -> tuple[KeyInfo, ...]:
    found = []
    for key, slots in each.shares.items():
        if standing.tenants_only and known_as(key) not in standing.tenants_only:
            continue
        limit, _ = each.of_key(key)
        lines = standing.limits.get(known_as(limit), {})
        line = lines.get("", NOTHING)
        # Where keys borrow, they take turns, and are not counted by themselves.
        in_use = None if standing.declarations.turns_by else line.in_use
        found.append(KeyInfo(key, in_use, line.waiting, _moment(line.first_due_ms), None, slots))
    return tuple(found)


def keys_page(
    delayed: Queues,
    standing: Standing,
    name: str,
    size: int,
    words: str = "",
    after: tuple[int, int, str] | None = None,
) -> tuple[list[KeyInfo], tuple[int, int, str] | None]:
    """Keys of a limit, those for which most waits in front, and behind which the next ones are.

    Only those with `words` in them.
    """
    lines = standing.limits.get(known_as(name), {})
    place = (-after[0], -after[1], after[2]) if after else None
    found = [
        (key, line)
        for key, line in _busiest(lines)
        if words in key and (place is None or (-line.waiting, -line.in_use, key) > place)
    ]
    names = [key for key, _ in found[:size]]
    shown = _keys(delayed, standing, _declared(standing, name), names)
    if len(found) <= size:
        return shown, None
    key, line = found[size - 1]
    return shown, (line.waiting, line.in_use, key)


def _keys(
    delayed: Queues, standing: Standing, each: Declared, keys: Sequence[str]
) -> list[KeyInfo]:
    lines = standing.limits.get(each.known_as, {})
    is_hidden = bool(standing.tenants_only) and not each.is_of_tenants
    names = {key: slot_name(each.name, key) for key in keys}
    now_ms, found = 0, dict[str, Room]()
    if each.every_ms and not is_hidden:
        now_ms, found = room(delayed.store, standing.queue, names.values())
    is_counted = _is_counted(standing, each)
    return [
        KeyInfo(
            key,
            line.in_use if is_counted else None,
            line.waiting,
            _moment(line.first_due_ms),
            _tokens(each, found[names[key]], now_ms) if found else None,
        )
        for key in keys
        for line in (lines.get(key, NOTHING),)
    ]


def _tokens(each: Declared, found: Room, now_ms: int) -> float:
    """Those that may be spent now."""
    ahead_ms = max(found.until_ms - now_ms, 0)
    return round(min(max(each.burst - ahead_ms / each.every_ms, 0), each.burst), 2)


def tenants(delayed: Queues, standing: Standing, names: Iterable[str]) -> list[TenantInfo]:
    """Some tenants of a queue, as `lanes` has their names."""
    wanted, found = list(names), dict[str, int]()
    if standing.declarations.turns_are_of_tenants:
        found = turns(delayed.store, standing.queue, wanted)
    return [_tenant(standing, name, found.get(name)) for name in wanted]


def _tenant(standing: Standing, name: str, turn: int | None) -> TenantInfo:
    line = standing.tenants[name]
    is_fair = standing.declarations.turns_are_of_tenants and line.waiting
    return TenantInfo(
        name,
        standing.queue,
        line.waiting,
        _moment(line.first_due_ms),
        line.weight if is_fair else None,
        None if turn is None else turn + 1,
        tuple(_wait(standing, *each) for each in sorted(line.waits_for.items(), key=_most)),
        tuple(_uses(standing, name)),
    )


def _uses(standing: Standing, tenant: str) -> Iterator[UseInfo]:
    for each in standing.declarations.of_tenants:
        if each.slots is not None or each.kind == "throttler":
            limit, key = each.of_key(tenant)
            line = standing.limits.get(known_as(limit), {}).get(key, NOTHING)
            is_here = each in standing.declarations.limits
            if line.in_use or (is_here and each.kind == "limit"):
                capacity = each.shares.get(tenant, each.slots)
                yield UseInfo(each.name, capacity, line.in_use)


def _most(each: tuple[str, int]) -> tuple[int, str]:
    return -each[1], each[0]


def _wait(standing: Standing, name: str, count: int) -> WaitInfo:
    limit, key = standing.named(*parts_of(name)) if name else ("", "")
    return WaitInfo(limit or None, key or None, count)


def _moment(at_ms: int) -> datetime | None:
    return from_ms(at_ms) if at_ms else None
