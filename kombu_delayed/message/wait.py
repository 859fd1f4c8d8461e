"""The part of a message that records its wait: since when, why, and earlier decisions.

It is the first member of the message's JSON, or the second after `due_ms` in a promoted message. It
has no brace inside, so that scripts add and remove it without parsing.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

_WAIT = re.compile(rb'\{(?:"due_ms": ?-?\d+, ?)?"wait": ?(\{[^}]*\})')
_IN_FRONT = re.compile(r'^\{(?:"due_ms": ?-?\d+, ?)?(?:"wait": ?\{[^}]*\}, ?)?')

#: Longer reasons are truncated.
REASON_LENGTH = 300


@dataclass(frozen=True)
class Wait:
    """Why a message waits beyond its first due time (ms since the epoch; None: unknown).

    `marks` records what policies have done once and need not repeat. `errors` counts how often a
    policy has failed on the message.
    """

    first_due_ms: int | None = None
    reason: str = ""
    marks: tuple[str, ...] = ()
    errors: int = 0

    @property
    def member(self) -> str:
        """The member of the message's JSON."""
        content = {
            "first_due_ms": self.first_due_ms,
            "reason": self.reason[:REASON_LENGTH],
            "marks": self.marks,
            "errors": self.errors,
        }
        text = json.dumps({name: value for name, value in content.items() if value})
        return '"wait":{' + text[1:-1].replace("{", "\\u007b").replace("}", "\\u007d") + "}"

    @classmethod
    def of(cls, content: Any) -> Wait:
        """Read the value of the member; values of other types, from other writers, are ignored."""
        if not isinstance(content, dict):
            return NO_WAIT
        first, marks = content.get("first_due_ms"), content.get("marks")
        errors = content.get("errors")
        return cls(
            first if type(first) is int else None,
            str(content.get("reason") or ""),
            tuple(map(str, marks)) if isinstance(marks, list) else (),
            errors if type(errors) is int else 0,
        )

    @classmethod
    def in_message(cls, message: bytes) -> Wait:
        """Read it from the text of a message. Nothing else of the text is parsed."""
        found = _WAIT.match(message)
        if found is None:
            return NO_WAIT
        try:
            return cls.of(json.loads(found[1]))
        except ValueError:
            return NO_WAIT

    def put_into(self, message: str) -> str:
        """The message with this wait, and without the due time of a promotion."""
        return "{" + self.member + "," + _IN_FRONT.sub("", message.lstrip(), count=1)


NO_WAIT = Wait()
