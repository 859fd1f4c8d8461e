"""Sets the numbers of limits at run time, and restores the declared ones."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from kombu_delayed.message.durations import parse_rate
from kombu_delayed.message.ticket import plain
from kombu_delayed.store.policies.overrides import Override

from ...app.queues import Queues
from ...errors import QueryError
from ...tasks.times import length_ms
from .declared import Policies, by_and_why
from .limit_usage import Declarations, place_of
from .limits import LimitInfo, gate_usage, limit
from .pauses import give_back_unbegun

if TYPE_CHECKING:
    from ...policies.limits.gated import Declared

#: The maximum, as for a Limit.
MOST = 1_000_000_000


def set_limit(
    queues: Queues,
    queue: str,
    name: str | None,
    concurrency: int | None,
    rate: str | None,
    burst: int | None,
    why: str,
    by: str | None,
    length: float | str | timedelta | None,
) -> LimitInfo:
    """Set other numbers for a limit. Raises QueryError for invalid values."""
    span_ms = 0 if length is None else length_ms("for_", length)
    declared = _declared(queues, queue, name)
    if concurrency is None and rate is None and burst is None:
        raise QueryError("set_limit takes at least one of concurrency=…, rate=… and burst=…")
    if concurrency is not None and declared.slots is None:
        raise QueryError(f"limit {declared.name!r} has no concurrency to change")
    if (rate is not None or burst is not None) and not declared.rate:
        raise QueryError(f"limit {declared.name!r} has no rate to change")
    slots, burst = _whole("concurrency", concurrency), _whole("burst", burst)
    try:
        parsed = None if rate is None else parse_rate(rate)
    except ValueError as error:
        raise QueryError(f"rate={error}") from error
    every_ms = None if parsed is None else parsed.every_ms
    text, at_ms = "" if parsed is None else str(parsed), int(time.time() * 1000)
    signed = by_and_why(by, why)
    override = Override(slots, every_ms, burst, text, 0, at_ms, *signed)
    with _fewer_at_once(queues, queue, declared):
        queues.store.overrides.set(place_of(declared, queue), declared.name, override, span_ms)
    found = limit(queues, gate_usage(queues, queue), declared.name)
    if found is None:
        raise QueryError(f"queue {queue!r} has no limit {declared.name!r} any more")
    return found


def reset_limit(queues: Queues, queue: str, name: str | None) -> bool:
    """Restore the declared numbers; returns whether others were set."""
    declared = _declared(queues, queue, name)
    with _fewer_at_once(queues, queue, declared):
        return queues.store.overrides.reset(place_of(declared, queue), declared.name)


@contextmanager
def _fewer_at_once(queues: Queues, queue: str, declared: Declared) -> Iterator[None]:
    """If the limit is lower afterwards, workers return the tasks that they have not started."""
    before = _slots(queues, queue, declared)
    yield
    if _slots(queues, queue, declared) < before:
        for name in _queues_of(queues, queue, declared):
            give_back_unbegun(queues, name)


def _slots(queues: Queues, queue: str, declared: Declared) -> int:
    found = queues.store.overrides.of(place_of(declared, queue)).get(plain(declared.name))
    return (found and found.slots) or declared.slots or 0


def _queues_of(queues: Queues, queue: str, declared: Declared) -> set[str]:
    """The queues with tasks that use a limit of this queue."""
    if not declared.is_global:
        return {queue}
    return {queue} | {
        name
        for name in queues.named
        if Declarations.of(queues, name).named(declared.name) is not None
    }


def _declared(queues: Queues, queue: str, name: str | None) -> Declared:
    """The limit of that name, or the only one."""
    declared = Declarations.of(queues, queue)
    own = [each for each in declared.limits if each.is_settable]
    found = own[0] if name is None and len(own) == 1 else declared.named(name or "")
    if found is not None and found.is_settable:
        return found
    if why := Policies(queues).strange([queue]):
        raise QueryError(
            f"this app cannot apply the policies of queue {queue!r}: {why[queue]}. Use the app "
            "that declares them"
        )
    if not own and found is None:
        raise QueryError(f"queue {queue!r} has no Limit or Drain whose numbers could change")
    known = ", ".join(repr(each.name) for each in own) or "none"
    asked = "name one of its limits" if name is None else f"there is no limit {name!r}"
    if found is not None:
        kind = found.kind.capitalize()
        asked = f"{name!r} is a {kind}, and only the numbers of a Limit or a Drain change"
    raise QueryError(f"{asked}: the limits of queue {queue!r} are: {known}")


def _whole(name: str, given: Any) -> int | None:
    is_number = isinstance(given, int) and not isinstance(given, bool)
    if given is not None and not (is_number and 1 <= given <= MOST):
        raise QueryError(f"{name}={given!r} is not a whole number from 1 to {MOST:,}")
    return given
