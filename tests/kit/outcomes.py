"""Records of tasks, written as by a worker that ran none."""

from __future__ import annotations

import json
import time
from typing import Any

from celery_ext import Delayed
from kombu_delayed.store.outcomes.records import Kept, Note, Outcomes

WORKER = "w1@host:7:ab"
NOW_MS = int(time.time() * 1000)
RECEIVED, STARTED = ["r", NOW_MS, 0, WORKER], ["s", NOW_MS, 0, WORKER, 7, 0]
LATE = ["s", NOW_MS, 0, WORKER, 7, 1]
FAILED = ["-", NOW_MS, 0, {"error": "ValueError", "message": "no", "args": "(7,)"}]


def note(
    delayed: Delayed,
    id: str,
    *rows: list[Any],
    queue: str = "celery",
    alive_ms: int = 60_000,
    tenant: str | None = None,
    is_slow: bool = False,
) -> None:
    """Record rows of one task of a worker, as a recorder does."""
    head = json.dumps(["t", "mail", tenant], separators=(",", ":")) + "\n"
    lines = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    made = Note(id, rows[-1][0], rows[-1][1], is_slow, head, lines)
    outcomes = Outcomes(delayed.store)
    delayed.store.all_of(
        outcomes.note_calls(queue, [made], Kept(1000, 86_400_000), WORKER, alive_ms)
    )
