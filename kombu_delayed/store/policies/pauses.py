"""Which queues are paused: nobody claims from those."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from ..calls.caller import Caller


class Pause(NamedTuple):
    """A pause of a queue. Times are in ms; one without an end lasts `until_ms` 0."""

    from_ms: int
    until_ms: int
    by: str
    why: str


class Pauses:
    """The pauses of the queues of a store. A queue is one shard."""

    def __init__(self, store: Caller) -> None:
        self._store = store

    def pause(self, queue: str, by: str, why: str, length_ms: int = 0) -> None:
        """Let nobody claim from a queue, for so long or until it is resumed."""
        note = json.dumps({"by": by, "why": why})
        self._store.ask("pause", queue, length_ms=length_ms, note=note)

    def resume(self, queue: str) -> bool:
        """Let consumers claim again, and tell them; returns whether it was paused."""
        return bool(self._store.ask("resume", queue))

    def of(self, queue: str) -> Pause | None:
        """The pause of a queue that is paused now."""
        found = self._read(queue)
        return found[0] if found and found[1] else None

    def resumed_ms(self, queue: str) -> int:
        """Since when a queue goes on that was paused within the last day; else 0."""
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
    except (ValueError, TypeError, KeyError):  # somebody has written it by hand
        return "", note.decode(errors="replace")
