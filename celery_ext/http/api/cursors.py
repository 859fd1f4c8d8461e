"""Cursors: where the next page begins, as text that is opaque to clients."""

from __future__ import annotations

import hmac
import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from itertools import count
from typing import TYPE_CHECKING, Any

from kombu_delayed.inspection.backlog import NEVER_MS
from kombu_delayed.store.calls.shards import queue_of

from ..problems import Problem

if TYPE_CHECKING:
    from .operations import Call

#: The length of the code at the beginning of a sealed cursor, in bytes.
CODE_SIZE = 16


def write(*parts: Any) -> str:
    return _as_text(json.dumps(parts).encode())


def read(text: str, *kinds: type) -> list[Any]:
    """Read the parts of a cursor. Raises a Problem if they do not have these types."""
    try:
        parts = json.loads(_as_bytes(text))
        if [type(part) for part in parts] == list(kinds):
            for part in parts:
                str(part).encode(errors="surrogateescape")  # as names of keys are encoded
            return list(parts)
    except (ValueError, TypeError, RecursionError):
        pass
    raise _unknown()


def write_place(call: Call, shard: str, at_ms: int, name: str) -> str:
    """The cursor for a place: the name of a shard, a time in ms, and the member or list there.

    A token that is restricted to tenants cannot read it: a task of another tenant may be there.
    """
    text = write(shard, at_ms, name)
    if not call.identity.tenants:
        return text
    raw, key = _as_bytes(text), call.service.cursor_key()
    code = _code(key, raw)
    return _as_text(code + _masked(key, code, raw))


def read_place(call: Call, text: str | None) -> tuple[str, int, str]:
    """Read a place.

    Without a cursor, it is the place before all others. Raises a Problem as `read`, and for a queue
    that the caller may not see.
    """
    if text is None:
        return "", 0, ""
    if call.identity.tenants:
        text = _unsealed(call.service.cursor_key(), text)
    shard, at_ms, name = read(text, str, int, str)
    if not call.identity.sees_queue(queue_of(shard)):
        raise Problem.of_field("cursor", "it belongs to another queue", 403)
    if not 0 <= at_ms <= NEVER_MS:
        raise _unknown()
    return shard, at_ms, name


def _unsealed(key: bytes, text: str) -> str:
    try:
        whole = _as_bytes(text)
    except ValueError:
        raise _unknown() from None
    code, masked = whole[:CODE_SIZE], whole[CODE_SIZE:]
    raw = _masked(key, code, masked)
    if not hmac.compare_digest(code, _code(key, raw)):
        raise _unknown()
    return _as_text(raw)


def _code(key: bytes, raw: bytes) -> bytes:
    return hmac.digest(key, b"code" + raw, "sha256")[:CODE_SIZE]


def _masked(key: bytes, code: bytes, raw: bytes) -> bytes:
    """Mask some bytes, or unmask them again. The code differs for each text."""
    blocks = (hmac.digest(key, b"mask" + code + n.to_bytes(4, "big"), "sha256") for n in count())
    mask = (each for block in blocks for each in block)
    return bytes(a ^ b for a, b in zip(raw, mask, strict=False))


def _as_text(raw: bytes) -> str:
    return urlsafe_b64encode(raw).decode().rstrip("=")


def _as_bytes(text: str) -> bytes:
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _unknown() -> Problem:
    return Problem.of_field("cursor", "this server has not issued it")
