"""The policies that are declared for queues: what all consumers of a queue go by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ..calls.caller import Caller, without_errors
from ..calls.scripts import Call

#: What the version begins with of what a producer has offered.
_OFFERED = "offered:"

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

    @property
    def is_offered(self) -> bool:
        """Whether a producer said it where nothing was declared: what consumers say goes first."""
        return self.version.startswith(_OFFERED)


class PolicyRecords:
    """What is declared for the queues of a store. A queue is one shard."""

    def __init__(self, store: Caller) -> None:
        self._store = store

    def read(self, queue: str) -> PolicyRecord:
        """What holds for a queue."""
        return self.read_all([queue])[0]

    def read_all(self, queues: Sequence[str]) -> list[PolicyRecord]:
        """What holds for each of these queues, asked in few round trips. Raises the first error."""
        return without_errors(self.read_each(queues))

    def read_each(self, queues: Sequence[str]) -> list[PolicyRecord | BaseException]:
        """As `read_all`. Of a queue that cannot be read the error is in its place."""
        commands = [
            ("HMGET", self._store.keys(queue).policies, "version", "text", "by", "at")
            for queue in queues
        ]
        found = self._store.run.many(commands)
        return [each if isinstance(each, BaseException) else _read(each) for each in found]

    def declare(self, queue: str, text: str, by: str, known: PolicyRecord) -> bool:
        """Let other policies hold, unless others do than those that are known by now."""
        move, given = self.declare_call(queue, text, by, known)
        return bool(move(self._store.run, **given))

    def declare_call(self, queue: str, text: str, by: str, known: PolicyRecord) -> Call:
        """The script that does it, for who sends it with others."""
        given = {"known": known.version, "version": version_of_text(text), "text": text, "by": by}
        return self._store.call("declare", queue, **given)

    def offer(self, queues: Sequence[str], text: str, by: str) -> None:
        """Let policies hold for those of these queues for which nothing is declared.

        What the server refuses stays undone. Raises connection errors.
        """
        version = f"{_OFFERED}{version_of_text(text)}"
        given = {"known": "", "version": version, "text": text, "by": by}
        found = zip(queues, self.read_each(queues), strict=True)
        self._store.together(
            [
                self._store.call("declare", queue, **given)
                for queue, known in found
                if known == PolicyRecord()
            ]
        )


def version_of_text(text: str) -> str:
    """The version of what is declared."""
    return hashlib.sha1(text.encode()).hexdigest()[:10]


def as_text(declared: Mapping[str, Any]) -> str:
    """What is declared, as it is kept: the same text for the same meaning."""
    return json.dumps(declared, sort_keys=True, separators=(",", ":"))


def parsed(text: str) -> dict[str, Any]:
    """What a text declares; nothing where it is damaged."""
    with suppress(ValueError):
        if isinstance(found := json.loads(text or "{}"), dict):
            return found
    return {}


def _read(found: Sequence[bytes | None]) -> PolicyRecord:
    version, text, by, at_ms = [(each or b"").decode(errors="replace") for each in found]
    return PolicyRecord(version, text, by, int(at_ms or 0))
