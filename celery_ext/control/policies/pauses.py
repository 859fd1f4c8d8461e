"""Pauses of queues: who has paused which one, and why; and how a pause begins and ends."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from celery.utils.log import get_logger

from kombu_delayed.store.policies.pauses import Pause
from kombu_delayed.store.store import Store

from ...app.queues import Queues
from ...errors import BROKER_FAILS, QueryError
from ...tasks.times import from_ms, length_ms

logger = get_logger(__name__)

#: The remote control command that lets workers give back what they have not begun.
HOLD = "delayed_hold"

#: Characters of a name or a reason; longer ones are cut.
TEXT_SIZE = 500


@dataclass(frozen=True)
class QueuePause:
    """A paused queue, or a task or a tenant in it. `until` None: it has no end."""

    queue: str
    since: datetime
    until: datetime | None
    by: str
    why: str
    task: str | None = None
    tenant: str | None = None


def pause(
    queues: Queues,
    queue: str,
    why: str = "",
    by: str | None = None,
    length: float | str | timedelta | None = None,
) -> QueuePause:
    """Pause a queue. Raises QueryError for one that nobody knows, or a wrong length."""
    span_ms = 0 if length is None else length_ms("for_", length)
    queues.check_queue(queue)
    store = queues.store
    for shard in shards_of(queues, queue):
        store.pauses.pause(shard, (by or caller())[:TEXT_SIZE], why[:TEXT_SIZE], span_ms)
    tell_workers(queues, queue)
    found = pause_of(store, queue, shards_of(queues, queue))
    if found is None:
        raise QueryError(f"queue {queue!r} is not paused: it was resumed in the meantime")
    return found


def resume(queues: Queues, queue: str) -> bool:
    """Resume a queue; returns whether it was paused."""
    pauses = queues.store.pauses
    return sum(pauses.resume(shard) for shard in shards_of(queues, queue)) > 0


def pauses(queues: Queues, names: Sequence[str]) -> list[QueuePause]:
    """The pauses of those queues that are paused now."""
    shards = queues.store.shards
    found = [pause_of(queues.store, name, shards.all(name)) for name in names]
    return [each for each in found if each is not None]


def pause_of(store: Store, queue: str, shards: Sequence[str]) -> QueuePause | None:
    """The pause of a queue, given with its shards."""
    found = [each for shard in shards if (each := store.pauses.of(shard)) is not None]
    return shown(queue, found[0]) if found else None


def shards_of(queues: Queues, queue: str) -> Sequence[str]:
    """The shards of a queue now; their number may have grown."""
    queues.store.shards.look_again()
    return queues.store.shards.all(queue)


def shown(
    queue: str, found: Pause, task: str | None = None, tenant: str | None = None
) -> QueuePause:
    """A pause of a queue, or of a part of it, as users see it."""
    until = from_ms(found.until_ms) if found.until_ms else None
    return QueuePause(queue, from_ms(found.from_ms), until, found.by, found.why, task, tenant)


def tell_workers(queues: Queues, queue: str) -> None:
    """Have them give back what they have not begun."""
    try:
        queues.app.control.broadcast(HOLD, {"queue": queue})
    except BROKER_FAILS as error:  # they find out when they claim again
        logger.warning("Workers were not told that queue %r is paused: %s", queue, error)


def caller() -> str:
    """Who changes something, where nobody says so."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError, ImportError):  # a container may have a user without a name
        return socket.gethostname()
