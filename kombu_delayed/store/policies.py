"""The policies that are declared for queues: what all consumers of a queue go by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .caller import Caller, without_errors

#: What the reason begins with for which a message waits whose task or tenant is paused.
PAUSED = "paused:"


class PolicyRecord(NamedTuple):
    """What is declared for a queue, as JSON, by whom, and when, in ms since the epoch.

    An empty `version` and `text`: nothing was ever declared.
    """

    version: str = ""
    text: str = ""
    by: str = ""
    at_ms: int = 0


class PolicyRecords:
    """What is declared for the queues of a store. A queue is one shard."""

    def __init__(self, store: Caller) -> None:
        self._store = store

    def read(self, queue: str) -> PolicyRecord:
        """What holds for a queue."""
        return self.read_all([queue])[0]

    def read_all(self, queues: Sequence[str]) -> list[PolicyRecord]:
        """What holds for each of these queues, asked in few round trips."""
        commands = [
            ("HMGET", self._store.keys(queue).policies, "version", "text", "by", "at")
            for queue in queues
        ]
        return [_read(found) for found in without_errors(self._store.run.many(commands))]

    def declare(self, queue: str, text: str, by: str, known: PolicyRecord) -> bool:
        """Let other policies hold, unless others do than those that are known by now."""
        version = hashlib.sha1(text.encode()).hexdigest()[:10]
        given = {"known": known.version, "version": version, "text": text, "by": by}
        return bool(self._store.ask("declare", queue, **given))


def as_text(declared: Mapping[str, Any]) -> str:
    """What is declared, as it is kept: the same text for the same meaning."""
    return json.dumps(declared, sort_keys=True, separators=(",", ":"))


def _read(found: Sequence[bytes | None]) -> PolicyRecord:
    version, text, by, at_ms = [(each or b"").decode(errors="replace") for each in found]
    return PolicyRecord(version, text, by, int(at_ms or 0))
