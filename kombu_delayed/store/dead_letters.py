"""Reads, replays and drops dead letters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..connection.commands import pairs
from ..message import clock
from ..message.wait import Wait
from .calls.caller import Caller, chunks

#: The reason of a dead letter whose note is damaged.
UNREADABLE_NOTE = "the note of why it was buried cannot be read"


@dataclass(frozen=True)
class DeadLetter:
    """A message that was buried. `message` is its JSON text as delivered."""

    id: str
    message: bytes
    reason: str
    consumer: str
    at_ms: int
    deliveries: int
    #: The failed attempts, as recorded by the process that buried the message.
    failures: str = ""


def read_note(note: bytes) -> dict[str, Any]:
    """The fields of a `DeadLetter` from the note of a burial. A damaged note has `at_ms` 0.

    Members that a newer version may have added are ignored.
    """
    try:
        found = json.loads(note.decode(errors="replace"))
        return {
            "reason": str(found["reason"]),
            "consumer": str(found["consumer"]),
            "at_ms": int(found["at_ms"]),
            "deliveries": int(found["deliveries"]),
            "failures": str(found.get("failures") or ""),
        }
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return {"reason": UNREADABLE_NOTE, "consumer": "", "at_ms": 0, "deliveries": 0}


class DeadLetters:
    """The dead letters of the queues of a store."""

    def __init__(self, store: Caller) -> None:
        self._store = store

    def count(self, queue: str) -> int:
        """Count the dead letters of a queue."""
        return self._store.run("ZCARD", self._store.keys(queue).dead)

    def ids(self, queue: str, start: int = 0, count: int = 100) -> list[str]:
        """A page of the ids of a queue's dead letters, the oldest first."""
        found = self._store.run("ZRANGE", self._store.keys(queue).dead, start, start + count - 1)
        return [id.decode(errors="surrogateescape") for id in found]

    def page(
        self, queue: str, after: tuple[int, str] | None = None, count: int = 100
    ) -> list[tuple[int, str]]:
        """Burial times in ms and ids of dead letters, the oldest first, behind one of these.

        Which need not be there any more.
        """
        at_ms, id = after or (0, "")
        behind = b"" if after is None else b"=" + id.encode(errors="surrogateescape")
        found = self._store.ask("dead_page", queue, from_ms=at_ms, after=behind, limit=count)
        each = zip(found[::2], found[1::2], strict=True)
        return [(int(at), id.decode(errors="surrogateescape")) for id, at in each]

    def letters(self, queue: str, ids: Sequence[str]) -> list[DeadLetter]:
        """The dead letters with these ids, without those that no longer exist."""
        if not ids:
            return []
        raw = [id.encode(errors="surrogateescape") for id in ids]
        records, notes = self.records(queue, raw), self.notes(queue, raw)
        found = [
            DeadLetter(id, record[1:], **read_note(note))
            for id, record, note in zip(ids, records, notes, strict=True)
            if record is not None and note is not None
        ]
        return [each if each.at_ms else self._timed(queue, each) for each in found]

    def _timed(self, queue: str, letter: DeadLetter) -> DeadLetter:
        """A letter whose note lacks the time of the burial, with the time from the queue."""
        id = letter.id.encode(errors="surrogateescape")
        at_ms = self._store.run("ZSCORE", self._store.keys(queue).dead, id)
        return replace(letter, at_ms=int(float(at_ms or 0)))

    def records(self, queue: str, ids: Sequence[bytes]) -> list[bytes | None]:
        """Priority step + message of dead letters, None for an id without one."""
        return self._store.fields(queue, self._store.keys(queue).dead_messages, ids)

    def notes(self, queue: str, ids: Sequence[bytes]) -> list[bytes | None]:
        """The reason of each burial, as JSON."""
        return self._store.fields(queue, self._store.keys(queue).dead_reasons, ids)

    def scan(self, queue: str, count: int) -> Iterator[list[tuple[bytes, bytes]]]:
        """Ids and records in no order, about `count` per call."""
        hash = self._store.keys(queue).dead_messages
        for page in self._store.in_pages("scan", queue, hash=hash, count=count):
            yield [(id, self._store.unpacked(queue, id, record)) for id, record in pairs(page)]

    def replay(self, queue: str, ids: Sequence[str], due_ms: int = 0) -> int:
        """Replay dead letters now or at a time; returns how many there were."""
        if not ids:
            return 0
        due_ms = max(due_ms, 0)  # no record has a time before 1970
        # Policies compare it with the server's clock. That of this machine may be wrong.
        at_ms = due_ms or int(self._store.ask("room", queue, limits=[])[0])
        wait = Wait(at_ms + clock.ahead_ms).member
        given = {"due_ms": due_ms, "wait": wait}
        return sum(self._store.ask("replay", queue, **given, ids=part) for part in chunks(ids))

    def purge(self, queue: str, ids: Sequence[str]) -> int:
        """Drop dead letters for good; returns how many there were."""
        return sum(self._store.ask("forget", queue, ids=part) for part in chunks(ids))
