"""Backlogs that are too large to be sent one task at a time."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterator
from typing import Any

from kombu_delayed.message.envelope import open_kept
from kombu_delayed.store.store import CALL_LIMIT, Entry, Store
from kombu_delayed.transport.server_checks import inspect
from tests.benchmarks.app import QUEUE
from tests.benchmarks.rig import Rig

MONTH_MS = 30 * 86_400_000


def store_of(rig: Rig) -> Store:
    """A store like the one of a channel on this rig."""
    return Store(rig.redis, partition_size=inspect(rig.redis).partition_size)


def sample(rig: Rig, payload: int | None = None) -> tuple[str, str]:
    """Id and text of a message as Celery makes it, with so many bytes of arguments as JSON.

    Nothing is left in the backlog.
    """
    # Of which a list of one text needs four.
    argument = 1 if payload is None else "x" * (payload - 4)
    sent = rig.app.tasks["work"].apply_async((argument,), countdown=3600)
    stored: Any = rig.redis.hget(f"{{{QUEUE}}}:messages", sent.id)
    store_of(rig).purge(QUEUE)
    return sent.id, open_kept(stored).message.decode()


def fill(store: Store, queue: str, count: int, template: tuple[str, str]) -> None:
    """Schedule messages with new ids and due times of the coming month but its first hour."""
    now_ms = int(time.time() * 1000)
    chance = random.Random(1)
    left = count
    while left:
        size = min(left, CALL_LIMIT)
        store.schedule(queue, list(entries(size, template, chance, now_ms)))
        left -= size


def entries(
    count: int, template: tuple[str, str], chance: random.Random, now_ms: int
) -> Iterator[Entry]:
    template_id, text = template
    for _ in range(count):
        id = str(uuid.uuid4())
        due_ms = now_ms + chance.randrange(3_600_000, MONTH_MS)
        yield Entry(id, 0, text.replace(template_id, id), str(due_ms))
