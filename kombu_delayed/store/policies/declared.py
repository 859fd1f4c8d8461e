"""The policies that are declared for queues. All consumers of a queue apply them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ...message.ticket import version_of
from ..calls.caller import Caller, without_errors
from ..calls.scripts import Call

#: Prefix of the version of policies that a producer has offered.
_OFFERED = "offered:"

#: Prefix of the reason for which a message waits while its task or tenant is paused.
PAUSED = "paused:"

#: A member of a declaration that has only pauses: see `is_undeclared`.
UNDECLARED = "undeclared"


class PolicyRecord(NamedTuple):
    """The policies declared for a queue, as JSON, by whom, and when, in ms since the epoch.

    If nothing was ever declared, `version` and `text` are empty.
    """

    version: str = ""
    text: str = ""
    by: str = ""
    at_ms: int = 0

    @property
    def is_offered(self) -> bool:
        """Whether a producer declared it for lack of a declaration: consumers take precedence."""
        return self.version.startswith(_OFFERED)


def is_undeclared(declaration: Mapping[str, Any]) -> bool:
    """Whether nothing but pauses is declared, so that each program uses its own policies.

    Workers of earlier versions leave the mark where they declare policies.
    """
    return UNDECLARED in declaration and declaration.keys() <= {"paused", UNDECLARED}


class PolicyRecords:
    """The policies declared for the queues of a store. A queue is one shard."""

    def __init__(self, store: Caller) -> None:
        self._store = store

    def read(self, queue: str) -> PolicyRecord:
        """The policies that apply to a queue."""
        return self.read_all([queue])[0]

    def read_all(self, queues: Sequence[str]) -> list[PolicyRecord]:
        """The policies that apply to each queue, in few round trips. Raises the first error."""
        return without_errors(self.read_each(queues))

    def read_each(self, queues: Sequence[str]) -> list[PolicyRecord | BaseException]:
        """`read_all`, with the error in place of the record of a queue that cannot be read."""
        commands = [
            ("HMGET", self._store.keys(queue).policies, "version", "text", "by", "at")
            for queue in queues
        ]
        found = self._store.run.many(commands)
        return [each if isinstance(each, BaseException) else _read(each) for each in found]

    def declare(self, queue: str, text: str, by: str, known: PolicyRecord) -> bool:
        """Declare policies for a queue. Returns False if it has others than those in `known`."""
        move, given = self.declare_call(queue, text, by, known)
        return bool(move(self._store.run, **given))

    def declare_call(
        self, queue: str, text: str, by: str, known: PolicyRecord, prefix: str = ""
    ) -> Call:
        """The script of `declare` and its arguments, to be sent with other scripts."""
        version = f"{prefix}{version_of([text])}"
        given = {"known": known.version, "version": version, "text": text, "by": by}
        return self._store.call("declare", queue, **given)

    def offer(self, queues: Sequence[str], text: str, by: str) -> None:
        """Declare policies for those of these queues that have none.

        Ignores errors of the server. Raises connection errors.
        """
        nothing = PolicyRecord()
        found = zip(queues, self.read_each(queues), strict=True)
        new = [queue for queue, known in found if known == nothing]
        self._store.together([self.declare_call(each, text, by, nothing, _OFFERED) for each in new])


def as_text(declared: Mapping[str, Any]) -> str:
    """The stored form of declared policies: the same text for the same meaning."""
    return json.dumps(declared, sort_keys=True, separators=(",", ":"))


def parsed(text: str) -> dict[str, Any]:
    """The policies that a text declares; empty if it is damaged."""
    with suppress(ValueError):
        if isinstance(found := json.loads(text or "{}"), dict):
            return found
    return {}


def _read(found: Sequence[bytes | None]) -> PolicyRecord:
    version, text, by, at_ms = [(each or b"").decode(errors="replace") for each in found]
    return PolicyRecord(version, text, by, int(at_ms or 0))
