"""Pauses a queue, or only a task or a tenant in it while the rest of the queue continues."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from celery.utils.log import get_logger

from kombu_delayed.inspection.gate_usage import server_ms
from kombu_delayed.message import clock
from kombu_delayed.store.policies.declared import PAUSED
from kombu_delayed.store.policies.pauses import Pause

from ...app.queues import Queues
from ...errors import BROKER_FAILS, QueryError
from ...tasks.query import Query
from ...tasks.times import Length, from_ms, length_ms
from ..changes.change_many import pages
from ..changes.moves import Moves
from .declared import PartlyDone, by_and_why, change_declared, declared_of, in_shards, shards_of
from .drain import wait_until_drained

logger = get_logger(__name__)

#: The remote control command that lets workers return messages that they have not started.
HOLD = "delayed_hold"

#: The longest time for which a worker still holds back messages after the end of a pause.
LATE_SECONDS = 1.0


@dataclass(frozen=True)
class QueuePause:
    """A paused queue, or a task or a tenant in it. `until` is None if it has no end."""

    queue: str
    since: datetime
    until: datetime | None
    by: str
    why: str
    task: str | None = None
    tenant: str | None = None


class Part(NamedTuple):
    """The tasks with a name (* for any text), or of a tenant, or both; else the whole queue."""

    task: str | None
    tenant: str | None

    @property
    def is_all(self) -> bool:
        """Returns whether it is the whole queue. Raises QueryError for an empty name."""
        if "" in self:
            raise QueryError("the name of a task or a tenant is empty: omit it to mean all")
        return self == (None, None)


def pause(
    queues: Queues,
    queue: str,
    part: Part,
    why: str,
    by: str | None,
    length: Length | None,
    drain: Length | None = None,
) -> QueuePause:
    """Pause a queue or a part of it, and wait for `drain` until none of its tasks runs.

    Raises QueryError for an unknown queue, an invalid length, or an empty name, and StillRunning.
    """
    span_ms = 0 if length is None else length_ms("for_", length)
    drain_ms = None if drain is None else length_ms("drain", drain)
    is_all = part.is_all
    if drain_ms is not None and not is_all:
        raise QueryError("drain=… waits for a whole queue: omit task=… and tenant=…")
    queues.check_queue(queue)
    signed = by_and_why(by, why)
    shortens = False
    if is_all:
        try:
            in_shards(
                queues, queue, lambda shard: queues.store.pauses.pause(shard, *signed, span_ms)
            )
        except PartlyDone:
            give_back_unbegun(queues, queue)
            raise
        found = _pause_of(queues, queue, shards_of(queues, queue))
    else:
        from_ms = _now_ms(queues, queue)
        paused = Pause(from_ms, from_ms + span_ms if span_ms else 0, *signed)
        shortens = _has_longer(queues, queue, part, paused.until_ms)
        _change(queues, queue, part, [{**part._asdict(), **paused._asdict()}])
        found = _shown(queue, paused, *part)
    give_back_unbegun(queues, queue)
    if shortens:  # its messages wait for the end of the longer pause
        _let_all_go(queues, queue, part)
    if found is None:
        raise QueryError(f"queue {queue!r} is not paused: it was resumed in the meantime")
    if drain_ms is not None:
        wait_until_drained(queues, queue, drain_ms / 1000)
    return found


def resume(queues: Queues, queue: str, part: Part) -> bool:
    """End a pause, and run the messages that it has held back; returns whether there was one.

    Safe to call twice: after an interruption, the second call runs the messages that are left.
    """
    if part.is_all:
        return any(in_shards(queues, queue, queues.store.pauses.resume))
    was_paused = bool(_of_part(queues, queue, part))
    _change(queues, queue, part, [])
    _let_all_go(queues, queue, part, was_paused)
    return was_paused


def pauses(queues: Queues, names: Sequence[str]) -> list[QueuePause]:
    """The current pauses of these queues and of their parts."""
    shards = queues.store.shards
    found = [_pause_of(queues, name, shards.all(name)) for name in names]
    return [each for each in found if each is not None] + [
        _shown(name, Pause._make(map(own.get, Pause._fields)), own.get("task"), own.get("tenant"))
        for name, declared in zip(names, declared_of(queues, names), strict=True)
        for own in _lasting(queues, name, declared.get("paused", []))
    ]


def give_back_unbegun(queues: Queues, queue: str) -> None:
    """Tell workers to return the messages of a queue that they have not started."""
    try:
        queues.app.control.broadcast(HOLD, {"queue": queue})
    except BROKER_FAILS as error:  # they find out when they claim again
        logger.warning("Workers may still start tasks of %r that they have: %s", queue, error)


def _pause_of(queues: Queues, queue: str, shards: Sequence[str]) -> QueuePause | None:
    """The pause of a queue, given with its shards."""
    found = next(filter(None, map(queues.store.pauses.of, shards)), None)
    return None if found is None else _shown(queue, found)


def _shown(
    queue: str, found: Pause, task: str | None = None, tenant: str | None = None
) -> QueuePause:
    """A pause of a queue, or of a part of it, as users see it."""
    until = from_ms(found.until_ms) if found.until_ms else None
    return QueuePause(queue, from_ms(found.from_ms), until, found.by, found.why, task, tenant)


def _lasting(queues: Queues, queue: str, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The pauses of parts of a queue that have not ended."""
    if not any(each["until_ms"] for each in parts):
        return parts
    now_ms = _now_ms(queues, queue)
    return [each for each in parts if not 0 < each["until_ms"] <= now_ms]


def _now_ms(queues: Queues, queue: str) -> int:
    """The time that policies see, by which pauses of parts end."""
    return server_ms(queues.store, queue) + clock.ahead_ms


def _of_part(queues: Queues, queue: str, part: Part) -> list[dict[str, Any]]:
    """The pauses of this part of a queue, with those that have ended."""
    (found,) = declared_of(queues, [queue])
    return [each for each in found.get("paused", ()) if _is_of(each, part)]


def _has_longer(queues: Queues, queue: str, part: Part, until_ms: int) -> bool:
    """Whether the part has a pause that ends later than this; 0: never."""
    ends = [each["until_ms"] for each in _of_part(queues, queue, part)]
    return until_ms > 0 and any(not 0 < each <= until_ms for each in ends)


def _let_all_go(queues: Queues, queue: str, part: Part, was_paused: bool = True) -> None:
    """Let workers look again at the messages of a part that they have put back."""
    query = Query(queue=queue, **part._asdict())
    if _let_go(queues, query) or was_paused:
        time.sleep(LATE_SECONDS)
        _let_go(queues, query)


def _let_go(queues: Queues, query: Query) -> int:
    count = 0
    for shard, infos in pages(queues, query):
        held = [info for info in infos if info.reason.startswith(PAUSED)]
        count += Moves(queues).run_now(shard, held)
    return count


def _change(queues: Queues, queue: str, part: Part, now: list[dict[str, Any]]) -> None:
    """Replace the pauses of a part, and keep those of others."""

    def change(before: dict[str, Any]) -> dict[str, Any]:
        others = [each for each in before.get("paused", ()) if not _is_of(each, part)]
        rest = {name: before[name] for name in before if name != "paused"}
        return {**rest, "paused": [*others, *now]} if others or now else rest

    change_declared(queues, queue, change)


def _is_of(found: dict[str, Any], part: Part) -> bool:
    return (found.get("task"), found.get("tenant")) == part
