"""Cursors: where the next page begins, as text that is opaque to clients."""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any

from kombu_delayed.inspection.backlog import NEVER_MS
from kombu_delayed.store.calls.shards import queue_of

from ..auth.identity import Identity
from ..problems import Problem


def write(*parts: Any) -> str:
    return urlsafe_b64encode(json.dumps(parts).encode()).decode().rstrip("=")


def read(text: str, *kinds: type) -> list[Any]:
    """Read the parts of a cursor. Raises a Problem if they do not have these types."""
    try:
        parts = json.loads(urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        if [type(part) for part in parts] == list(kinds):
            for part in parts:
                str(part).encode(errors="surrogateescape")  # as names of keys are encoded
            return list(parts)
    except (ValueError, TypeError, RecursionError):
        pass
    raise _unknown()


def read_place(text: str | None, identity: Identity) -> tuple[str, int, str]:
    """Read a place: the name of a shard, a time in ms, and the member or list there.

    Without a cursor, it is the place before all others. Raises a Problem as `read`, and for a queue
    that the caller may not see.
    """
    if text is None:
        return "", 0, ""
    shard, at_ms, name = read(text, str, int, str)
    if not identity.sees_queue(queue_of(shard)):
        raise Problem.of_field("cursor", "it belongs to another queue", 403)
    if not 0 <= at_ms <= NEVER_MS:
        raise _unknown()
    return shard, at_ms, name


def _unknown() -> Problem:
    return Problem.of_field("cursor", "this server has not issued it")
