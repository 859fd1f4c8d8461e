"""Pauses of a queue, or of a task or a tenant in it: then the rest of the queue goes on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from kombu_delayed.inspection.gate_usage import server_ms
from kombu_delayed.store.policies.declared import PAUSED
from kombu_delayed.store.policies.pauses import Pause

from ...app.queues import Queues
from ...tasks.query import Query
from ...tasks.times import length_ms
from ..changes.change_many import pages
from ..changes.moves import Moves
from . import pauses as whole
from .declared import change_declared, declared_of
from .pauses import TEXT_SIZE, QueuePause, caller, shown, tell_workers

#: A worker that has claimed before the end of a pause keeps back for no longer what it has then.
LATE_SECONDS = 1.0


class Part(NamedTuple):
    """The tasks of a name, with * for any text, or those of a tenant, or both; else the queue."""

    task: str | None
    tenant: str | None

    @property
    def is_all(self) -> bool:
        """Whether it is the whole queue."""
        return self.task is None and self.tenant is None


def pause(
    queues: Queues,
    queue: str,
    part: Part,
    why: str,
    by: str | None,
    length: float | str | timedelta | None,
) -> QueuePause:
    """Pause a queue or a part of it.

    Raises QueryError for a queue that nobody knows, or a wrong length.
    """
    if part.is_all:
        return whole.pause(queues, queue, why, by, length)
    span_ms = 0 if length is None else length_ms("for_", length)
    queues.check_queue(queue)
    from_ms = server_ms(queues.store, queue)
    told = {"by": (by or caller())[:TEXT_SIZE], "why": why[:TEXT_SIZE]}
    found = {
        **part._asdict(),
        **told,
        "from_ms": from_ms,
        "until_ms": from_ms + span_ms if span_ms else 0,
    }
    _change(queues, queue, part, [found])
    tell_workers(queues, queue)
    return _shown(queue, found)


def resume(queues: Queues, queue: str, part: Part) -> bool:
    """End such a pause, and let run what it has kept back; returns whether there was one.

    Twice is safe: the second time lets run what the first, if it was interrupted, has not.
    """
    if part.is_all:
        return whole.resume(queues, queue)
    (found,) = declared_of(queues, [queue])
    was_paused = any(_is_of(each, part) for each in found.get("paused", ()))
    _change(queues, queue, part, [])
    query = Query(queue=queue, **part._asdict())
    if _let_go(queues, query) or was_paused:
        time.sleep(LATE_SECONDS)
        _let_go(queues, query)
    return was_paused


def pauses(queues: Queues, names: Sequence[str]) -> list[QueuePause]:
    """The pauses of these queues and of parts of them that last."""
    return whole.pauses(queues, names) + [
        _shown(name, each)
        for name, found in zip(names, declared_of(queues, names), strict=True)
        for each in _lasting(queues, name, found.get("paused", []))
    ]


def _lasting(queues: Queues, queue: str, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the pauses of parts of a queue, those that have not ended."""
    if not any(each["until_ms"] for each in parts):
        return parts
    now_ms = server_ms(queues.store, queue)
    return [each for each in parts if not 0 < each["until_ms"] <= now_ms]


def _let_go(queues: Queues, query: Query) -> int:
    count = 0
    for shard, infos in pages(queues, query):
        held = [info for info in infos if info.reason.startswith(PAUSED)]
        count += Moves(queues).run_now(shard, held)
    return count


def _change(queues: Queues, queue: str, part: Part, now: list[dict[str, Any]]) -> None:
    """Let these be the pauses of a part, beside those of others."""

    def change(before: dict[str, Any]) -> dict[str, Any]:
        others = [each for each in before.get("paused", ()) if not _is_of(each, part)]
        rest = {name: before[name] for name in before if name != "paused"}
        return {**rest, "paused": [*others, *now]} if others or now else rest

    change_declared(queues, queue, change)


def _is_of(found: dict[str, Any], part: Part) -> bool:
    return (found.get("task"), found.get("tenant")) == part


def _shown(queue: str, found: dict[str, Any]) -> QueuePause:
    pause = Pause(found["from_ms"], found["until_ms"], found["by"], found["why"])
    return shown(queue, pause, found.get("task"), found.get("tenant"))
