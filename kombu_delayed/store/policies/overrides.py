"""Numbers of limits that were set at run time. They replace the declared ones."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import NamedTuple

from ...connection.commands import pairs
from ...message.ticket import plain
from ..calls.caller import CALL_LIMIT, Caller


class Override(NamedTuple):
    """The numbers set for a limit; None keeps the declared one. Times are in ms, 0 means no end."""

    slots: int | None
    every_ms: float | None
    burst: int | None
    rate: str = ""
    until_ms: int = 0
    at_ms: int = 0
    by: str = ""
    why: str = ""

    @property
    def numbers(self) -> str:
        """The numbers in the form that scripts read."""
        each = self.slots, self.every_ms, self.burst
        return " ".join("-" if number is None else repr(number) for number in each)


class Overrides:
    """The overrides of the limits of queues. A queue with limits of its own has one shard."""

    def __init__(self, store: Caller) -> None:
        self._store = store

    def set(self, queue: str, limit: str, override: Override, length_ms: int = 0) -> None:
        """Override a limit for `length_ms` (0: until `reset`). Waiting messages try again."""
        about = {
            "by": override.by,
            "why": override.why,
            "at": override.at_ms,
            "rate": override.rate,
        }
        given = {"numbers": override.numbers, "length_ms": length_ms, "note": json.dumps(about)}
        self._store.ask("set_limit", queue, name=plain(limit), **given)
        self._retry(queue, limit)

    def reset(self, queue: str, limit: str) -> bool:
        """Apply the declared numbers again; returns whether there was an override."""
        was_set = bool(self._store.ask("reset_limit", queue, name=plain(limit)))
        self._retry(queue, limit)
        return was_set

    def of(self, queue: str) -> dict[str, Override]:
        """The overrides that apply now, by the names of limits in the form of slots."""
        found = self._store.ask("overrides", queue)
        return {name.decode(): _read(text) for name, text in pairs(found)}

    def _retry(self, queue: str, limit: str) -> None:
        given = {"name": plain(limit), "count": CALL_LIMIT}
        for _ in self._store.in_pages("retry_limit", queue, **given):
            pass


def _read(text: bytes) -> Override:
    slots, every_ms, burst, until_ms, note = text.decode(errors="replace").split(" ", 4)
    facts = {}
    with suppress(ValueError):  # it was written by hand
        facts = json.loads(note)
    return Override(
        None if slots == "-" else int(slots),
        None if every_ms == "-" else float(every_ms),
        None if burst == "-" else int(burst),
        str(facts.get("rate", "")),
        int(until_ms),
        int(facts.get("at", 0)),
        str(facts.get("by", "")),
        str(facts.get("why", "")),
    )
