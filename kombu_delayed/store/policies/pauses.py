"""Pauses of queues: no consumer claims from a paused queue."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from ..calls.caller import Caller


class Pause(NamedTuple):
    """A pause of a queue. Times are in ms; `until_ms` is 0 for a pause without an end."""

    from_ms: int
    until_ms: int
    by: str
    why: str


class Pauses:
    """The pauses of the queues of a store. A queue is one shard."""

    def __init__(self, store: Caller) -> None:
        self._store = store

    def pause(self, queue: str, by: str, why: str, length_ms: int = 0) -> None:
        """Let no consumer claim from a queue for `length_ms` (0: until it is resumed)."""
        note = json.dumps({"by": by, "why": why})
        self._store.ask("pause", queue, length_ms=length_ms, note=note)

    def resume(self, queue: str) -> bool:
        """Let consumers claim again, and wake them; returns whether the queue was paused."""
        return bool(self._store.ask("resume", queue))

    def of(self, queue: str) -> Pause | None:
        """The pause of a queue, or None if it is not paused now."""
        found = self._read(queue)
        return found[0] if found and found[1] else None

    def resumed_ms(self, queue: str) -> int:
        """When the last pause of a queue ended, if that was within the last day; else 0."""
        found = self._read(queue)
        return found[0].until_ms if found and not found[1] else 0

    def _read(self, queue: str) -> tuple[Pause, bool] | None:
        answer = self._store.ask("paused", queue)
        if not answer:
            return None
        from_ms, until_ms, note = answer[0].split(b" ", 2)
        return Pause(int(from_ms), abs(int(until_ms)), *_read_note(note)), bool(answer[1])


def _read_note(note: bytes) -> tuple[str, str]:
    try:
        found: Any = json.loads(note)
        return str(found["by"]), str(found["why"])
    except (ValueError, TypeError, KeyError):  # it was written by hand
        return "", note.decode(errors="replace")
