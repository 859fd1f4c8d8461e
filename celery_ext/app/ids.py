"""Task ids that sort by time."""

from __future__ import annotations

import secrets
import time
import uuid

import celery.app.base
import celery.app.task
import celery.canvas


def uuid7() -> str:
    """A UUID of version 7 (RFC 9562): 48 bits of Unix time in ms, the rest random."""
    since_ms = time.time_ns() // 1_000_000
    high = since_ms << 16 | 0x7 << 12 | secrets.randbits(12)
    return str(uuid.UUID(int=high << 64 | 0b10 << 62 | secrets.randbits(62)))


KINDS = {"uuid7": uuid7}


def use_ids(kind: str) -> None:
    """Let Celery make ids of this kind in the whole process. Raises ValueError if it is unknown."""
    if kind not in KINDS:
        raise ValueError(f"task_ids takes one of {', '.join(KINDS)}, not {kind!r}")
    # Celery has no setting for it; these are the places where it makes ids.
    for module in (celery.app.base, celery.app.task, celery.canvas):
        module.uuid = KINDS[kind]
